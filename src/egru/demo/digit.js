// Strokes in, a 28 by 28 image out, prepared as the images of MNIST: the drawing fills a box of 20 by 20 pixels, with
// its aspect ratio, and is centred by mass. The pen has a constant width in the image, so that small drawings do not
// become bold.
const SIDE = 28;
const BOX = 20;
const PEN = 2.2; // pixels of the image; strokes of MNIST have about this width
const SAMPLES = 3; // per pixel and direction
const SMALLEST = 12; // extent in units of the drawing area below which a drawing is not enlarged further

function bounds(strokes) {
  const box = { left: Infinity, top: Infinity, right: -Infinity, bottom: -Infinity };
  for (const stroke of strokes)
    for (const [x, y] of stroke) {
      box.left = Math.min(box.left, x);
      box.right = Math.max(box.right, x);
      box.top = Math.min(box.top, y);
      box.bottom = Math.max(box.bottom, y);
    }
  return box;
}

// Fit the strokes, with the width of the pen, into the box in the middle of the image, and return their segments in
// pixels.
function fit(strokes) {
  const box = bounds(strokes);
  const width = box.right - box.left, height = box.bottom - box.top;
  const scale = (BOX - PEN) / Math.max(width, height, SMALLEST);
  const map = ([x, y]) => [
    (x - (box.left + box.right) / 2) * scale + SIDE / 2,
    (y - (box.top + box.bottom) / 2) * scale + SIDE / 2,
  ];
  const segments = [];
  for (const stroke of strokes) {
    const points = stroke.map(map);
    for (let i = 0; i < points.length; i++) segments.push([...points[Math.max(i - 1, 0)], ...points[i]]);
  }
  return segments;
}

// Return the fraction of each pixel that is within half a pen width of a segment.
function cover(segments) {
  const fine = SIDE * SAMPLES, radius = PEN / 2, ink = new Uint8Array(fine * fine);
  for (const [x0, y0, x1, y1] of segments) {
    const dx = x1 - x0, dy = y1 - y0, length2 = dx * dx + dy * dy;
    const first = (v) => Math.max(0, Math.floor((v - radius) * SAMPLES));
    const last = (v) => Math.min(fine - 1, Math.ceil((v + radius) * SAMPLES));
    for (let j = first(Math.min(y0, y1)); j <= last(Math.max(y0, y1)); j++)
      for (let i = first(Math.min(x0, x1)); i <= last(Math.max(x0, x1)); i++) {
        const x = (i + 0.5) / SAMPLES - x0, y = (j + 0.5) / SAMPLES - y0;
        const t = length2 ? Math.min(1, Math.max(0, (x * dx + y * dy) / length2)) : 0;
        if ((x - t * dx) ** 2 + (y - t * dy) ** 2 <= radius * radius) ink[j * fine + i] = 1;
      }
  }
  const image = new Float32Array(SIDE * SIDE);
  for (let j = 0; j < fine; j++)
    for (let i = 0; i < fine; i++)
      image[Math.floor(j / SAMPLES) * SIDE + Math.floor(i / SAMPLES)] += ink[j * fine + i] / SAMPLES ** 2;
  return image;
}

// Return the offset by which the centre of mass moves to the centre of the image.
function massOffset(image) {
  let mass = 0, x = 0, y = 0;
  image.forEach((value, k) => {
    mass += value;
    x += value * ((k % SIDE) + 0.5);
    y += value * (Math.floor(k / SIDE) + 0.5);
  });
  return mass ? [SIDE / 2 - x / mass, SIDE / 2 - y / mass] : [0, 0];
}

function toImage(strokes) {
  const drawn = strokes.filter((stroke) => stroke.length);
  if (!drawn.length) return new Float32Array(SIDE * SIDE);
  const segments = fit(drawn);
  const [dx, dy] = massOffset(cover(segments)).map(Math.round); // MNIST shifts by whole pixels
  return cover(segments.map(([x0, y0, x1, y1]) => [x0 + dx, y0 + dy, x1 + dx, y1 + dy]));
}
