// Event raster: the input, one dot per event and the number of active units, with zoom and tooltips.
const colour = (name) => {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
};

/** Colours of the levels 1 to 255: one ramp, or two that meet at zero if the values have both signs. */
function ramp(data) {
  const values = [0, 1, 2, 3].map((i) => colour(`--value${i}`));
  const both = [colour("--alarm"), colour("--faint"), values[3]];
  const zero = data.high > data.low ? (0 - data.low) / (data.high - data.low) : 0;
  const between = (stops, at) => {
    const i = Math.min(Math.floor(at * (stops.length - 1)), stops.length - 2), part = at * (stops.length - 1) - i;
    return stops[i].map((c, n) => Math.round(c + part * (stops[i + 1][n] - c)));
  };
  return Array.from({ length: 256 }, (_, level) => {
    const at = (level - 1) / 254;
    if (data.low < 0 && data.high > 0) return between(both, clamp(at < zero ? (0.5 * at) / zero : 0.5 + (0.5 * (at - zero)) / (1 - zero), 0, 1));
    return between(values, clamp(data.low < 0 ? 1 - at : at, 0, 1));
  });
}

/** A bitmap with one pixel per cell, to be scaled to the size of a panel. */
function bitmap(columns, rows, paint) {
  const canvas = document.createElement("canvas");
  canvas.width = columns; canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  for (let i = 0; i < columns * rows; i++) image.data.set(paint(i), 4 * i);
  context.putImageData(image, 0, 0);
  return canvas;
}

function raster(plot, data) {
  const T = data.steps, units = data.layers.flatMap((layer) => layer.units.map((unit) => ({ unit, layer })));
  const size = data.layers.reduce((sum, layer) => sum + layer.size, 0);
  const H = units.length, events = data.bytes ??= bytes(data.events);
  const view = data.view ??= { t0: 0, t1: T, u0: 0, u1: H };
  const width = plot.clientWidth, narrow = width < 560;
  const side = data.image ? (narrow ? 84 : 128) : 0;
  const left = 52, panel = width - left - 4;
  const words = data.words.length ? 66 : 0;
  const above = { y: 6, h: clamp(2 * data.input.rows, 36, 84) };
  const main = { y: above.y + above.h + words + 8, h: clamp(H * 3, 150, narrow ? 300 : 400) };
  const below = { y: main.y + main.h + 8, h: 44 }, height = below.y + below.h + 36;
  plot.innerHTML =
    `<div class="top">${side ? `<canvas class="picture" style="width:${side}px;height:${Math.round((side * data.image.rows) / data.image.columns)}px"></canvas>` : ""}` +
    `<div><h3>${escape(data.title)}</h3><p class="small">${escape(data.label)}</p><div class="scale"><span>${threeDigits(data.low)}</span><canvas></canvas><span>${threeDigits(data.high)}</span> event value</div>` +
    `<div class="tools"><button data-zoom="0.5">zoom in</button><button data-zoom="2">zoom out</button><button data-move="-0.5" aria-label="earlier">◀</button><button data-move="0.5" aria-label="later">▶</button><button data-reset>reset</button></div></div></div>` +
    `<canvas class="raster" style="width:${width}px;height:${height}px"></canvas>`;
  const canvas = plot.querySelector(".raster"), context = canvas.getContext("2d"), scale = Math.max(1, devicePixelRatio || 1);
  canvas.width = width * scale; canvas.height = height * scale;
  const grey = colour("--ink"), colours = ramp(data), css = (name) => `rgb(${colour(name)})`;
  const input = bytes(data.input.data);
  const inputBitmap = bitmap(T, data.input.rows, (i) => [...grey, input[i]]);
  const dots = bitmap(T, H, (i) => (events[i] ? [...colours[events[i]], 255] : [0, 0, 0, 0]));
  const bar = plot.querySelector(".scale canvas");
  bar.width = 254; bar.height = 1;
  bar.getContext("2d").drawImage(bitmap(254, 1, (i) => [...colours[i + 1], 255]), 0, 0);
  const frames = data.image && bytes(data.image.data);
  const showFrame = (step) => {
    if (!frames) return;
    const picture = plot.querySelector(".picture"), pixels = data.image.rows * data.image.columns;
    const start = pixels * Math.min(step, data.image.frames - 1);
    picture.width = data.image.columns; picture.height = data.image.rows;
    picture.getContext("2d").drawImage(bitmap(data.image.columns, data.image.rows, (i) => [...grey, frames[start + i]]), 0, 0);
  };
  showFrame(Math.floor(T / 2));

  const x = (t) => left + ((t - view.t0) / (view.t1 - view.t0)) * panel;
  const y = (u) => main.y + ((u - view.u0) / (view.u1 - view.u0)) * main.h;
  let pointed = null, box = null;

  function paint() {
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px " + getComputedStyle(document.body).fontFamily;
    context.imageSmoothingEnabled = false;
    const ink = css("--ink"), muted = css("--muted"), faint = css("--faint");
    const frame = (area) => { context.strokeStyle = faint; context.lineWidth = 1; context.strokeRect(left - 0.5, area.y - 0.5, panel + 1, area.h + 1); };
    const text = (words, px, py, align = "left", fill = muted) => { context.fillStyle = fill; context.textAlign = align; context.fillText(words, px, py); };
    const span = view.t1 - view.t0;
    if (data.input.rows === 1) { // one input: a curve
      context.fillStyle = muted;
      for (let t = Math.floor(view.t0); t < Math.min(T, Math.ceil(view.t1)); t++) {
        const a = clamp(x(t), left, left + panel), b = clamp(x(t + 1), left, left + panel), h = (input[t] / 255) * above.h;
        context.fillRect(a, above.y + above.h - h, Math.max(0.5, b - a), h);
      }
    } else context.drawImage(inputBitmap, view.t0, 0, span, data.input.rows, left, above.y, panel, above.h);
    frame(above);
    text("input", left - 8, above.y + above.h / 2 + 4, "right");
    if (words && span <= panel / 11.5) // as many words as fit, upright
      for (let t = Math.floor(view.t0); t < Math.min(T, Math.ceil(view.t1)); t++) {
        const at = (x(t) + x(t + 1)) / 2;
        if (at < left || at > left + panel) continue;
        context.save(); context.translate(at + 4, above.y + above.h + 5); context.rotate(Math.PI / 2);
        text(data.words[t].slice(0, 10), 0, 0); context.restore();
      }
    else if (words) text("zoom in to read the words", left, above.y + above.h + 18);

    context.drawImage(dots, view.t0, view.u0, span, view.u1 - view.u0, left, main.y, panel, main.h);
    frame(main);
    let first = 0;
    for (const layer of data.layers) {
      const last = first + layer.units.length, a = clamp(y(first), main.y, main.y + main.h), b = clamp(y(last), main.y, main.y + main.h);
      if (first && a > main.y && a < main.y + main.h) { context.fillStyle = ink; context.fillRect(left, a - 0.75, panel, 1.5); }
      if (b - a > 34) {
        context.save(); context.translate(14, (a + b) / 2); context.rotate(-Math.PI / 2);
        text(b - a > 130 ? `${layer.name || "units"}, most active first` : layer.name || "units", 0, 0, "center", ink); context.restore();
        text(String(Math.max(0, Math.round(view.u0) - first)), left - 6, a + 11, "right");
      }
      first = last;
    }
    const most = Math.max(1, ...data.active);
    context.fillStyle = css("--hue0");
    for (let t = Math.floor(view.t0); t < Math.min(T, Math.ceil(view.t1)); t++) {
      const a = clamp(x(t), left, left + panel), b = clamp(x(t + 1), left, left + panel), h = (data.active[t] / most) * below.h;
      context.fillRect(a, below.y + below.h - h, Math.max(0.5, b - a - (b - a > 6 ? 1 : 0)), h);
    }
    frame(below);
    text("active", left - 8, below.y + below.h, "right");
    text(String(most), left - 8, below.y + 11, "right");
    for (const mark of ticks(view.t0, view.t1, clamp(width / 90, 2, 10)).filter(Number.isInteger))
      if (x(mark + 0.5) < left + panel) text(String(mark), x(mark + 0.5), below.y + below.h + 15, "center");
    text("time step", left + panel, below.y + below.h + 31, "right");
    if (!events.some(Boolean)) text("no events", left + panel / 2, main.y + main.h / 2, "center");
    if (pointed) {
      context.fillStyle = ink; context.globalAlpha = 0.12;
      context.fillRect(x(pointed.t), above.y, x(pointed.t + 1) - x(pointed.t), below.y + below.h - above.y);
      context.fillRect(left, y(pointed.u), panel, Math.max(1.5, y(pointed.u + 1) - y(pointed.u)));
      context.globalAlpha = 1;
    }
    if (box) {
      context.strokeStyle = ink; context.setLineDash([4, 3]);
      context.strokeRect(Math.min(box.x0, box.x1), Math.min(box.y0, box.y1), Math.abs(box.x1 - box.x0), Math.abs(box.y1 - box.y0));
      context.setLineDash([]);
    }
    canvas.dataset.view = [view.t0, view.t1, view.u0, view.u1].map((v) => +v.toFixed(2)).join(" ");
  }

  const setView = (t0, t1, u0, u1) => {
    const steps = clamp(t1 - t0, Math.min(4, T), T), rows = clamp(u1 - u0, Math.min(4, H), H);
    view.t0 = clamp(t0, 0, T - steps); view.t1 = view.t0 + steps;
    view.u0 = clamp(u0, 0, H - rows); view.u1 = view.u0 + rows;
    pointed = null;
    paint();
  };
  const position = (event) => {
    const area = canvas.getBoundingClientRect();
    return { x: event.clientX - area.left, y: event.clientY - area.top };
  };
  const step = (px) => clamp(Math.floor(view.t0 + ((px - left) / panel) * (view.t1 - view.t0)), 0, T - 1);
  const unit = (py) => clamp(Math.floor(view.u0 + ((py - main.y) / main.h) * (view.u1 - view.u0)), 0, H - 1);

  /** The nearest event within a few pixels of the pointer, or else the cell under it. */
  function nearest(px, py) {
    const t = step(px), u = unit(py), reach = 7;
    const dt = Math.ceil(reach / (x(1) - x(0))), du = Math.ceil(reach / (y(1) - y(0)));
    let best = { t, u }, distance = reach;
    for (let a = Math.max(0, t - dt); a <= Math.min(T - 1, t + dt); a++)
      for (let b = Math.max(0, u - du); b <= Math.min(H - 1, u + du); b++) {
        const d = Math.hypot(Math.max(x(a) - px, px - x(a + 1), 0), Math.max(y(b) - py, py - y(b + 1), 0));
        if (events[b * T + a] && d < distance) { best = { t: a, u: b }; distance = d; }
      }
    return best;
  }

  canvas.onpointermove = (event) => {
    const at = position(event);
    if (box) { box.x1 = clamp(at.x, left, left + panel); box.y1 = clamp(at.y, main.y, main.y + main.h); hideTip(); return paint(); }
    if (at.x < left || at.x > left + panel || at.y < above.y || at.y > below.y + below.h) { pointed = null; hideTip(); return paint(); }
    const inside = at.y >= main.y && at.y <= main.y + main.h;
    pointed = inside ? nearest(at.x, at.y) : { t: step(at.x), u: -9e9 };
    showFrame(pointed.t);
    const word = data.words[pointed.t];
    let text = `step ${pointed.t}${word === undefined ? "" : `, “${escape(word)}”`}: ${data.active[pointed.t]} of ${size} units active`;
    if (inside) {
      const { unit: number, layer } = units[pointed.u], row = events.subarray(pointed.u * T, (pointed.u + 1) * T);
      const level = row[pointed.t], active = row.reduce((sum, e) => sum + (e > 0), 0);
      const value = data.low + ((level - 1) / 254) * (data.high - data.low);
      text = `<b>${layer.name ? `${escape(layer.name)}, ` : ""}unit ${number}</b><br>${level ? `event ${threeDigits(value)}` : "no event"} at step ${pointed.t}` +
        `${word === undefined ? "" : `, “${escape(word)}”`}<br>active at ${active} of ${T} steps`;
    }
    showTip(text, event);
    paint();
  };
  canvas.onpointerdown = (event) => {
    if (event.pointerType !== "mouse") return canvas.onpointermove(event); // touch shows tooltips and scrolls; the buttons zoom
    if (event.button) return;
    const at = position(event);
    if (at.x < left || at.y < main.y || at.y > main.y + main.h) return;
    box = { x0: at.x, y0: at.y, x1: at.x, y1: at.y };
    canvas.setPointerCapture?.(event.pointerId);
  };
  canvas.onpointerup = () => {
    const drawn = box;
    box = null;
    if (!drawn || Math.abs(drawn.x1 - drawn.x0) < 6 || Math.abs(drawn.y1 - drawn.y0) < 6) return paint();
    const time = (px) => view.t0 + ((px - left) / panel) * (view.t1 - view.t0);
    const row = (py) => view.u0 + ((py - main.y) / main.h) * (view.u1 - view.u0);
    setView(time(Math.min(drawn.x0, drawn.x1)), time(Math.max(drawn.x0, drawn.x1)), row(Math.min(drawn.y0, drawn.y1)), row(Math.max(drawn.y0, drawn.y1)));
  };
  canvas.onpointerleave = (event) => { if (!box && event.pointerType !== "touch") { pointed = null; hideTip(); paint(); } };
  canvas.ondblclick = () => setView(0, T, 0, H);
  plot.querySelector(".tools").onclick = (event) => {
    const { zoom, move, reset } = event.target.dataset;
    if (reset !== undefined) setView(0, T, 0, H);
    const span = view.t1 - view.t0, rows = view.u1 - view.u0;
    if (zoom) setView(view.t0 + (span * (1 - zoom)) / 2, view.t0 + (span * (1 + +zoom)) / 2, view.u0 + (rows * (1 - zoom)) / 2, view.u0 + (rows * (1 + +zoom)) / 2);
    if (move) setView(view.t0 + move * span, view.t1 + move * span, view.u0, view.u1);
  };
  paint();
}
