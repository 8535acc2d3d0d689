// Points in one panel or several, with labels and an optional front: runs, trials of a search, trials of a sweep.
function scatter(plot, data) {
  const across = clamp(Math.floor(plot.clientWidth / 300), 1, data.panels.length);
  const width = Math.floor((plot.clientWidth - 12 * (across - 1)) / across), left = 58, right = 16, top = 14, height = 210;
  const legend = data.legend
    ? `<div class="legend">${data.legend.map((e) => `<span><i class="dot" style="background:${e.colour}"></i>${escape(e.name)}</span>`).join("")}</div>` : "";

  /** The range of an axis, its ticks, and a map from values to [0, 1]. */
  const makeAxis = (axis, values, count) => {
    if (axis.categories) {
      const last = axis.categories.length - 1, place = (v) => (v + 0.5) / (last + 1);
      return { place, marks: axis.categories.map((name, i) => [i, name]) };
    }
    const map = axis.log ? Math.log10 : (v) => v;
    let low = map(Math.min(...values)), high = map(Math.max(...values));
    const spare = 0.08 * (high - low) || 0.04 * Math.abs(high) || 1;
    low -= spare; high += spare;
    if (axis.format === "percent") { low = Math.max(low, 0); high = Math.min(high, 1); }
    const marks = axis.log ? logTicks(10 ** low, 10 ** high) : ticks(low, high, count);
    const format = axis.format === "percent" && high - low < 0.04 ? (v) => percent(v, high - low < 0.004 ? 2 : 1) : formats[axis.format].tick;
    const sparse = marks.filter((_, i) => i % Math.ceil(marks.length / (count + 2)) === 0);
    return { place: (v) => (map(v) - low) / (high - low), marks: sparse.map((mark) => [mark, format(mark)]) };
  };

  const drawPanel = (panel, number) => {
    const x = makeAxis(panel.x, panel.points.map((p) => p.x), clamp(width / 95, 2, 5));
    const y = makeAxis(panel.y, panel.points.map((p) => p.y), 4);
    const px = (v) => left + x.place(v) * (width - left - right), py = (v) => top + (1 - y.place(v)) * height;
    let svg = "";
    for (const [mark, text] of y.marks)
      svg += `<line x1="${left}" x2="${width - right}" y1="${py(mark)}" y2="${py(mark)}" class="grid"/><text x="${left - 7}" y="${py(mark) + 4}" class="tick end">${escape(text)}</text>`;
    const room = ((width - left - right) / Math.max(1, x.marks.length)) / 6.6; // characters of a label
    for (const [mark, text] of x.marks) {
      const short = panel.x.categories && String(text).length > room ? `${String(text).slice(0, Math.max(1, room - 1))}…` : text;
      svg += `<line x1="${px(mark)}" x2="${px(mark)}" y1="${top}" y2="${top + height}" class="grid"/><text x="${px(mark)}" y="${top + height + 17}" class="tick middle">${escape(short)}</text>`;
    }
    if (panel.x.label !== panel.title) svg += `<text x="${width - right}" y="${top + height + 35}" class="tick end">${escape(panel.x.label)}</text>`;
    if (panel.front) {
      const path = panel.front.map((i, n) => (n ? `H${px(panel.points[i].x)}V${py(panel.points[i].y)}` : `M${px(panel.points[i].x)} ${py(panel.points[i].y)}`)).join("");
      svg += `<path d="${path}" class="line" style="stroke:var(--hue0)"/>`;
    }
    panel.points.forEach((p, i) => {
      const paint = p.hollow ? `fill:var(--card);stroke:${p.colour};stroke-width:1.6` : `fill:${p.colour};fill-opacity:0.8`;
      svg += `<circle data-point="${number} ${i}" cx="${px(p.x)}" cy="${py(p.y)}" r="${p.large ? 5.5 : 4.2}" style="${paint}"/>`;
    });
    const boxes = panel.points.map((p) => [px(p.x) - 4, py(p.y) - 4, px(p.x) + 4, py(p.y) + 4]);
    for (const p of panel.points.filter((point) => point.label !== undefined)) {
      const wide = 7 * String(p.label).length + 2, at = [px(p.x), py(p.y)];
      const places = [[7, -5], [-7 - wide, -5], [7, 14], [-7 - wide, 14], [-wide / 2, -9], [-wide / 2, 19]].map(([dx, dy]) => [at[0] + dx, at[1] + dy]);
      const isFree = ([a, b]) => a > left && a + wide < width - 2 && b > 10 && boxes.every((o) => a > o[2] || a + wide < o[0] || b - 10 > o[3] || b < o[1]);
      const place = places.find(isFree);
      if (!place) continue; // the tooltip still names the point
      boxes.push([place[0], place[1] - 10, place[0] + wide, place[1]]);
      svg += `<text x="${place[0]}" y="${place[1]}" class="label">${escape(p.label)}</text>`;
    }
    return `<div><h3>${escape(panel.title)}</h3><svg width="${width}" height="${top + height + (panel.x.label === panel.title ? 26 : 42)}">${svg}</svg></div>`;
  };

  plot.innerHTML = `${legend}<div class="panels" style="grid-template-columns:repeat(${across}, minmax(0, 1fr))">${data.panels.map(drawPanel).join("")}</div>`;
  for (const drawing of plot.querySelectorAll("svg")) {
    drawing.onpointermove = drawing.onpointerdown = (event) => {
      if (!event.target.dataset.point) return hideTip();
      const [number, i] = event.target.dataset.point.split(" ").map(Number), panel = data.panels[number], p = panel.points[i];
      const value = (axis, v) => `<br>${escape(axis.label)} ${escape(axis.categories ? axis.categories[v] : formats[axis.format].value(v))}`;
      showTip(`<b>${escape(p.name)}</b>${value(panel.x, p.x)}${value(panel.y, p.y)}${p.note ? `<br>${escape(p.note)}` : ""}`, event);
    };
    drawing.onpointerleave = (event) => { if (event.pointerType !== "touch") hideTip(); };
  }
}
