const kinds = { lines, histogram, raster, scatter };
const draw = () => {
  hideTip();
  for (const [name, data] of Object.entries(figures)) {
    const figure = document.getElementById(name);
    kinds[data.kind](figure.querySelector(".plot"), data);
    figure.dataset.drawn = data.kind;
  }
};
let drawn = document.documentElement.clientWidth;
addEventListener("resize", () => {
  if (document.documentElement.clientWidth === drawn) return; // a mobile browser's toolbar appeared or disappeared
  drawn = document.documentElement.clientWidth;
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("scroll", hideTip, { passive: true });
draw();
