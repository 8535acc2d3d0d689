// Helpers of all figures: number formats, tooltips, ticks. page.js comes last and draws the figures.
const figures = JSON.parse(document.getElementById("numbers").textContent);
const escape = (text) => String(text).replace(/ %/g, "\u00a0%").replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
const threeDigits = (value) => (value === 0 ? "0" : Math.abs(value) >= 1000 ? value.toFixed(0) : String(+value.toPrecision(3)));
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

const tip = document.getElementById("tip");
const showTip = (html, event) => {
  tip.innerHTML = html;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
  const y = event.clientY + 14 + box.height > innerHeight ? event.clientY - box.height - 14 : event.clientY + 14;
  tip.style.transform = `translate(${Math.max(4, x)}px, ${Math.max(4, y)}px)`;
};
const hideTip = () => { tip.hidden = true; };

const ticks = (low, high, count) => {
  const rough = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const marks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) marks.push(+(i * step).toPrecision(12));
  return marks;
};

const logTicks = (low, high) => {
  const marks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const m of [1, 2, 5]) if (m * 10 ** power >= low && m * 10 ** power <= high) marks.push(m * 10 ** power);
  return marks.length > 1 ? marks : ticks(low, high, 4);
};

const withUnit = (units) => (value) => {
  const [limit, unit] = units.find(([limit]) => Math.abs(value) >= 0.9995 * limit) ?? units[units.length - 1];
  return `${threeDigits(value / limit)}${unit}`;
};
const count = withUnit([[1e9, "G"], [1e6, "M"], [1e3, "K"], [1, ""]]);
const seconds = withUnit([[1, " s"], [1e-3, " ms"], [1e-6, " µs"], [1e-9, " ns"]]);
/** Formats of the axes: of ticks and of values in tooltips. */
const formats = {
  count: { tick: count, value: count },
  seconds: { tick: seconds, value: seconds },
  percent: { tick: (v) => percent(v, 0), value: (v) => percent(v, 2) },
  number: { tick: threeDigits, value: (v) => String(+v.toPrecision(4)) },
};
