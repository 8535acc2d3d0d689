// The interactive picture of one unit on the page concepts/unit. No dependencies.
(() => {
  const STEPS = 80, LEFT = 36, RIGHT = 632, TOP = 12, BOTTOM = 236;
  const plot = document.getElementById("unit-plot");
  if (!plot) return;
  const control = (name) => document.getElementById(`unit-${name}`);
  const xOf = (t) => LEFT + (t / STEPS) * (RIGHT - LEFT);
  const yOf = (c) => BOTTOM - ((c + 0.3) / 1.4) * (BOTTOM - TOP);

  function simulate(theta, u, z, reset) {
    const states = [], events = [];
    let c = 0, y = 0;
    for (let t = 0; t < STEPS; t++) {
      const input = t >= 45 && t < 60 ? 0 : z;
      const kept = reset === "hard" && y !== 0 ? 0 : c;
      let now = u * input + (1 - u) * kept;
      if (reset === "output") now -= y;
      const event = now > theta;
      states.push(now);
      if (event) events.push([t, now]);
      y = event ? now : 0;
      c = reset === "threshold" && event ? now - theta : now;
    }
    return { states, events };
  }

  function draw(last) {
    const theta = Number(control("theta").value), u = Number(control("u").value), z = Number(control("z").value);
    const { states, events } = simulate(theta, u, z, control("reset").value);
    const path = states.slice(0, last).map((c, t) => `${t ? "L" : "M"}${xOf(t).toFixed(1)} ${yOf(c).toFixed(1)}`).join("");
    const axis = [0, 0.5, 1].map((v) => `<text class="unit-tick" x="4" y="${yOf(v) + 4}">${v}</text>` +
      `<line class="unit-grid" x1="${LEFT}" x2="${RIGHT}" y1="${yOf(v)}" y2="${yOf(v)}"/>`).join("");
    const input = `M${xOf(0)} ${yOf(z)}H${xOf(45)}V${yOf(0)}H${xOf(60)}V${yOf(z)}H${xOf(STEPS)}`;
    const dots = events.filter(([t]) => t < last).map(([t, c]) =>
      `<line class="unit-stem" x1="${xOf(t)}" x2="${xOf(t)}" y1="${yOf(0)}" y2="${yOf(c)}"/>` +
      `<circle class="unit-event" cx="${xOf(t)}" cy="${yOf(c)}" r="4"/>`).join("");
    plot.innerHTML = `${axis}<path class="unit-input" d="${input}"/>` +
      `<line class="unit-theta" x1="${LEFT}" x2="${RIGHT}" y1="${yOf(theta)}" y2="${yOf(theta)}"/>` +
      `<path class="unit-state" d="${path}"/>${dots}` +
      `<text class="unit-tick" text-anchor="end" x="${RIGHT}" y="256">${events.length} events in ${STEPS} steps</text>`;
    for (const name of ["theta", "u", "z"]) control(name).nextElementSibling.value = Number(control(name).value).toFixed(2);
  }

  for (const name of ["theta", "u", "z", "reset"]) control(name).addEventListener("input", () => draw(STEPS));
  control("play").addEventListener("click", () => {
    let t = 0;
    const timer = setInterval(() => { draw(++t); if (t >= STEPS) clearInterval(timer); }, 40);
  });
  draw(STEPS);
})();
