// The page: drawing, reading pixel by pixel, scores, raster and counters.
const $ = (id) => document.getElementById(id);
const AREA = 280; // units of the drawing area
const PIXELS_PER_SECOND = 260;
const PAUSE = 500; // milliseconds after a stroke before the drawing is read

const still = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

const state = {
  strokes: [], // lists of points
  stroke: null, // the one being drawn
  pen: [AREA / 2, AREA / 2], // of the keyboard
  penDown: false,
  penShown: false,
  image: new Float32Array(SIDE * SIDE),
  read: 0, // pixels that have been read
  events: [], // per pixel read: units and values
  eventCount: 0,
  token: 0, // identifies the current reading
  timer: 0,
};
let network = null;
const rows = new Int32Array(NETWORK.units).fill(-1); // row of each unit in the raster
NETWORK.order.forEach((unit, row) => { rows[unit] = row; });

// ---- canvases -------------------------------------------------------------------------------------------------------

// Set the size of a canvas to device pixels and return its context with units of CSS pixels.
function prepare(canvas) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width, height };
}

function drawPad() {
  const { context, width } = prepare($("pad")), scale = width / AREA;
  context.scale(scale, scale);
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = 18;
  context.strokeStyle = context.fillStyle = colour("ink");
  for (const stroke of state.strokes) {
    context.beginPath();
    stroke.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
    if (stroke.length === 1) context.lineTo(stroke[0][0] + 0.01, stroke[0][1]);
    context.stroke();
  }
  if (!state.strokes.length && !state.penShown) {
    context.fillStyle = colour("muted");
    context.font = "15px Inter, 'Helvetica Neue', 'Segoe UI', Arial, sans-serif";
    context.textAlign = "center";
    context.fillText("draw here", AREA / 2, AREA / 2);
  }
  if (state.penShown) {
    context.strokeStyle = colour("accent");
    context.lineWidth = 2.5;
    context.beginPath();
    context.arc(...state.pen, state.penDown ? 5 : 10, 0, 2 * Math.PI);
    context.stroke();
  }
}

function drawImage() {
  const { context, width } = prepare($("image")), size = width / SIDE, ratio = devicePixelRatio || 1;
  const edge = (i) => Math.round(i * size * ratio) / ratio; // on device pixels: neighbours share no blurred edge
  context.fillStyle = colour("ink");
  state.image.forEach((value, k) => {
    const x = k % SIDE, y = Math.floor(k / SIDE);
    context.globalAlpha = value;
    if (value) context.fillRect(edge(x), edge(y), edge(x + 1) - edge(x), edge(y + 1) - edge(y));
  });
  context.globalAlpha = 0.16;
  context.fillStyle = colour("accent");
  const row = Math.floor(state.read / SIDE), column = state.read % SIDE;
  context.fillRect(0, 0, width, row * size);
  context.fillRect(0, row * size, column * size, size);
  if (state.read && state.read < SIDE * SIDE) {
    context.globalAlpha = 1;
    context.strokeStyle = colour("accent");
    context.lineWidth = 2;
    context.strokeRect(column * size - 1, row * size - 1, size + 2, size + 2);
  }
}

function drawStrip() {
  const { context, width, height } = prepare($("strip")), step = width / (SIDE * SIDE);
  context.fillStyle = colour("line");
  context.fillRect(0, 0, width, height);
  context.fillStyle = colour("ink");
  for (let t = 0; t < state.read; t++) {
    context.globalAlpha = state.image[t];
    if (state.image[t]) context.fillRect(t * step, 0, Math.max(step, 1), height);
  }
}

function drawRaster(from) {
  const canvas = $("raster");
  let context, width, height;
  if (from) {
    context = canvas.getContext("2d");
    [width, height] = [canvas.clientWidth, canvas.clientHeight];
  } else ({ context, width, height } = prepare(canvas));
  const ramp = [0, 1, 2, 3].map((i) => colour("value" + i));
  const dx = width / (SIDE * SIDE), dy = height / NETWORK.order.length;
  const w = Math.max(dx, 1.3), h = Math.max(dy, 1.3);
  for (let t = from; t < state.events.length; t++) {
    const { units, values } = state.events[t];
    for (let k = 0; k < units.length; k++) {
      const row = rows[units[k]];
      if (row < 0) continue;
      context.fillStyle = ramp[Math.min(3, Math.floor(4 * Math.abs(values[k])))];
      context.fillRect(t * dx, row * dy, w, h);
    }
  }
}

// ---- numbers --------------------------------------------------------------------------------------------------------

const whole = (value) => Math.round(value).toLocaleString("en-US");

function count(value) {
  if (value < 1e5) return whole(value);
  const [unit, size] = value < 1e6 ? ["K", 1e3] : ["M", 1e6];
  return (value / size).toPrecision(3).replace(/\.?0+$/, "") + " " + unit;
}

function showScores(probabilities) {
  const best = probabilities ? probabilities.indexOf(Math.max(...probabilities)) : -1;
  [...$("scores").children].forEach((item, digit) => {
    const value = probabilities ? probabilities[digit] : 0;
    item.classList.toggle("best", digit === best);
    item.querySelector(".track > span").style.width = 100 * value + "%";
    item.lastElementChild.textContent = probabilities ? Math.round(100 * value) + " %" : "";
  });
  return best;
}

function showWork() {
  const macs = state.read && network ? network.macs() : 0, dense = state.read * NETWORK.dense;
  $("macs").textContent = count(macs);
  $("dense").textContent = count(dense);
  const all = NETWORK.dense * SIDE * SIDE;
  $("macs-bar").style.width = (100 * macs) / all + "%";
  $("dense-bar").style.width = (100 * dense) / all + "%";
  $("ratio").textContent = macs ? (dense / macs).toFixed(dense / macs < 20 ? 1 : 0) + " ×" : "–";
  const units = NETWORK.units * Math.max(state.read, 1);
  $("facts").textContent = state.read
    ? `${whole(state.eventCount)} events so far: ${((100 * state.eventCount) / units).toFixed(1)} % of ` +
      `${NETWORK.units} units are active per pixel on average.`
    : `${NETWORK.units} units, ${whole(NETWORK.dense)} multiply-accumulates per pixel if nothing is skipped.`;
}


function showProgress() {
  $("position").textContent =
    state.read && state.read < SIDE * SIDE
      ? `pixel ${state.read} of ${SIDE * SIDE}, row ${Math.floor(state.read / SIDE) + 1}`
      : "28 × 28 pixels, centred as in MNIST";
}

// ---- reading --------------------------------------------------------------------------------------------------------

function readPixels(target) {
  const from = state.read;
  while (state.read < target) {
    const events = network.step(state.image[state.read++]);
    state.events.push(events);
    state.eventCount += events.units.length;
  }
  drawRaster(from);
  drawStrip();
  drawImage();
  showProgress();
  showWork();
  return showScores(softmax(network.scores()));
}

function restart() {
  clearTimeout(state.timer);
  state.token++;
  Object.assign(state, { read: 0, events: [], eventCount: 0 });
  if (network) network.reset();
  document.body.dataset.state = "idle";
  drawRaster(0);
  drawStrip();
  drawImage();
  showScores(null);
  showProgress();
  showWork();
}

// Read the drawing from the first pixel, at a pace that can be followed, or at once if motion is to be reduced.
function readDrawing() {
  liftPen();
  restart();
  if (!state.strokes.length || !network) return;
  state.image = toImage(state.strokes);
  document.body.dataset.state = "reading";
  $("answer").textContent = "Reading …";
  const token = state.token, pixels = SIDE * SIDE;
  let start = null;
  const frame = (now) => {
    if (token !== state.token) return;
    start ??= now;
    const target = still.matches ? pixels : Math.min(pixels, Math.ceil(((now - start) / 1000) * PIXELS_PER_SECOND) + 1);
    const best = readPixels(target);
    if (state.read < pixels) return requestAnimationFrame(frame);
    finish(best);
  };
  requestAnimationFrame(frame);
}

function finish(best) {
  const probability = softmax(network.scores())[best], ratio = (SIDE * SIDE * NETWORK.dense) / network.macs();
  $("answer").replaceChildren("The network reads ", Object.assign(document.createElement("b"), { textContent: best }));
  $("answer").append(` (${Math.round(100 * probability)} %), with ${ratio.toFixed(0)} times fewer multiply-accumulates.`);
  Object.assign(document.body.dataset, { digit: best, events: state.eventCount, macs: network.macs() });
  document.body.dataset.state = "done";
}

function readSoon() {
  clearTimeout(state.timer);
  state.timer = setTimeout(readDrawing, PAUSE);
}

// ---- drawing --------------------------------------------------------------------------------------------------------

function changed() {
  state.image = toImage(state.strokes);
  restart();
  drawPad();
  $("read").disabled = $("clear").disabled = !state.strokes.length;
}

function clearDrawing() {
  Object.assign(state, { strokes: [], stroke: null, penDown: false });
  $("answer").textContent = "Draw a digit, or press a key from 0 to 9.";
  changed();
}

function liftPen() {
  state.penDown = false;
  state.stroke = null;
  drawPad();
}

function addPoint(point) {
  const clamped = point.map((v) => Math.min(AREA, Math.max(0, v)));
  if (!state.stroke) state.strokes.push((state.stroke = []));
  state.stroke.push(clamped);
}

function showExample(digit) {
  state.penShown = false;
  clearDrawing();
  state.strokes = EXAMPLES[digit].map((stroke) => stroke.map(([x, y]) => [x, y]));
  changed();
  readDrawing();
}

function listen() {
  const pad = $("pad");
  const place = (event) => {
    const box = pad.getBoundingClientRect(), scale = AREA / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  };
  pad.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pad.setPointerCapture(event.pointerId);
    state.penShown = state.penDown = false;
    state.stroke = null;
    addPoint(place(event));
    changed();
  });
  pad.addEventListener("pointermove", (event) => {
    if (!state.stroke || state.penDown || !pad.hasPointerCapture(event.pointerId)) return;
    const all = event.getCoalescedEvents ? event.getCoalescedEvents() : [];
    for (const part of all.length ? all : [event]) addPoint(place(part));
    drawPad();
  });
  for (const end of ["pointerup", "pointercancel"])
    pad.addEventListener(end, () => {
      if (!state.stroke || state.penDown) return;
      state.stroke = null;
      changed();
      readSoon();
    });
  pad.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? 28 : 7;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (event.key in moves) {
      state.penShown = true;
      state.pen = state.pen.map((v, i) => Math.min(AREA, Math.max(0, v + moves[event.key][i])));
      if (state.penDown) addPoint(state.pen);
      if (state.penDown) changed();
      else drawPad();
    } else if (event.key === " ") {
      state.penShown = true;
      state.penDown = !state.penDown;
      if (state.penDown) {
        addPoint(state.pen);
        changed();
      } else {
        liftPen();
        readSoon();
      }
    } else if (event.key === "Enter") readDrawing();
    else if (event.key === "Escape") clearDrawing();
    else return;
    event.preventDefault();
  });
  pad.addEventListener("blur", () => {
    if (state.penDown) readSoon();
    state.penShown = false;
    liftPen();
  });
  document.addEventListener("keydown", (event) => {
    if (/^[0-9]$/.test(event.key) && !event.ctrlKey && !event.metaKey && !event.altKey) showExample(Number(event.key));
  });
  $("clear").addEventListener("click", clearDrawing);
  $("read").addEventListener("click", readDrawing);
  let next = 0;
  $("example").addEventListener("click", () => showExample([3, 8, 2, 5, 0, 7, 4, 9, 6, 1][next++ % 10]));
  const redraw = () => {
    drawPad();
    drawImage();
    drawStrip();
    drawRaster(0);
  };
  addEventListener("resize", redraw);
  dark.addEventListener("change", redraw);
}

async function start() {
  for (let digit = 0; digit < 10; digit++) {
    const item = document.createElement("li");
    item.innerHTML = `<span>${digit}</span><span class="track"><span></span></span><span></span>`;
    $("scores").append(item);
  }
  const hidden = NETWORK.units - NETWORK.order.length;
  $("raster-note").textContent =
    `Time runs to the right, from the first to the last pixel; the strip above shows their brightness. Each row is a ` +
    `unit, each dot an event, coloured by its value. The most active units are at the top` +
    (hidden ? `; ${hidden} units that are never active on the test images are left out.` : ".");
  listen();
  changed();
  try {
    network = await loadNetwork(WASM, 10);
  } catch (error) {
    $("answer").textContent = "The network could not be started: " + error.message;
    return;
  }
  document.body.dataset.ready = "yes";
  if (state.strokes.length) readDrawing();
}
start();
