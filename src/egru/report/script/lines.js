// Curves by epoch: one panel per quantity, side by side on wide pages. A panel may end below its largest value.
function lines(plot, data) {
  const across = plot.clientWidth > 800 ? data.panels.length : 1;
  const width = Math.floor((plot.clientWidth - 12 * (across - 1)) / across);
  const left = 52, right = 14, top = 6, gap = 16, height = across > 1 ? 190 : 138;
  const series = data.panels.flatMap((panel) => panel.series);
  const names = [...new Map(series.map((s) => [s.name, s])).values()];
  const epochs = [...new Set(series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
  const low = epochs[0], high = epochs[epochs.length - 1];
  const dashes = ["6 3", "2 3", "9 3 2 3", "12 4"], dense = names.filter((s) => s.dash).map((s) => s.name);
  const dash = (s) => (s.dash ? ` stroke-dasharray="${dashes[dense.indexOf(s.name) % dashes.length]}"` : "");
  const x = (epoch) => (high === low ? (left + width - right) / 2 : left + ((epoch - low) / (high - low)) * (width - left - right));

  const drawPanel = (panel, isLast) => {
    const values = panel.series.flatMap((s) => s.points.map((p) => p[1]));
    const map = panel.log ? Math.log10 : (v) => v;
    let bottom = map(panel.low ?? Math.min(...values)), ceiling = map(panel.high ?? Math.max(...values));
    const spare = 0.06 * (ceiling - bottom || Math.abs(ceiling) || 1);
    bottom -= spare; ceiling += spare;
    if (panel.percent) { bottom = Math.max(bottom, 0); ceiling = Math.min(ceiling, 1); }
    if (ceiling - bottom < 1e-9) bottom = ceiling - 0.01;
    const y = (value) => top + height - ((map(value) - bottom) / (ceiling - bottom)) * height;
    const format = panel.percent ? (v) => percent(v, ceiling - bottom < 0.04 ? 1 : 0) : threeDigits;
    const marks = panel.log ? logTicks(10 ** bottom, 10 ** ceiling) : ticks(bottom, ceiling, 4);
    let svg = "", curves = "";
    for (const mark of marks)
      svg += `<line x1="${left}" x2="${width - right}" y1="${y(mark)}" y2="${y(mark)}" class="grid"/>` +
        `<text x="${left - 7}" y="${y(mark) + 4}" class="tick end">${format(mark)}</text>`;
    for (const s of panel.series) {
      const path = s.points.map((p, j) => `${j ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
      curves += `<path d="${path}" style="stroke:${s.colour}"${dash(s)} class="line"/>`;
      if (s.points.length === 1) curves += `<circle cx="${x(s.points[0][0])}" cy="${y(s.points[0][1])}" r="3.5" style="fill:${s.colour}"/>`;
    }
    const area = `${left - 2} ${top - 4} ${width - left + 2} ${height + 8}`, [ax, ay, aw, ah] = area.split(" ");
    svg += `<svg x="${ax}" y="${ay}" width="${aw}" height="${ah}" viewBox="${area}">${curves}</svg>`; // clips the curves
    const labelled = across > 1 || isLast, foot = top + height + gap;
    if (labelled) {
      for (const mark of ticks(low, high, clamp(width / 90, 2, 8)).filter(Number.isInteger))
        svg += `<text x="${x(mark)}" y="${foot}" class="tick middle">${mark}</text>`;
      svg += `<text x="${width - right}" y="${foot + 17}" class="tick end">${escape(data.x)}</text>`;
    }
    panel.y = (value) => clamp(y(value), top, top + height);
    panel.format = panel.percent ? percent : threeDigits;
    return `<div><h3>${escape(panel.title)}</h3><svg width="${width}" height="${labelled ? foot + 20 : foot - 8}">${svg}<g class="cursor"></g></svg></div>`;
  };

  const legend = names.length > 1 || data.legend
    ? `<div class="legend">${names.map((s) => `<span><svg width="30" height="8"><path d="M0 4H30" style="stroke:${s.colour}"${dash(s)} class="sample"/></svg>${escape(s.name)}</span>`).join("")}</div>` : "";
  const panels = data.panels.map((panel, i) => drawPanel(panel, i === data.panels.length - 1));
  plot.innerHTML = `${legend}<div class="panels" style="grid-template-columns:repeat(${across}, minmax(0, 1fr))">${panels.join("")}</div>`;
  const drawings = [...plot.querySelectorAll(".panels > div > svg")];
  const move = (event) => {
    const at = event.clientX - event.currentTarget.getBoundingClientRect().left;
    const epoch = epochs.reduce((best, e) => (Math.abs(x(e) - at) < Math.abs(x(best) - at) ? e : best));
    let text = `<b>${escape(data.x)} ${epoch}</b>`;
    data.panels.forEach((panel, i) => {
      let marks = `<line x1="${x(epoch)}" x2="${x(epoch)}" y1="${top}" y2="${top + height}" class="rule"/>`;
      if (data.panels.length > 1) text += `<br><em>${escape(panel.title)}</em>`;
      for (const s of panel.series) {
        const point = s.points.find((p) => p[0] === epoch);
        if (!point) continue;
        marks += `<circle cx="${x(epoch)}" cy="${panel.y(point[1])}" r="3.5" style="fill:${s.colour}"/>`;
        text += `<br><i style="color:${s.colour}">●</i> ${escape(s.name)} ${panel.format(point[1])}`;
      }
      drawings[i].querySelector(".cursor").innerHTML = marks;
    });
    showTip(text, event);
  };
  const leave = (event) => {
    if (event.pointerType === "touch") return;
    for (const drawing of drawings) drawing.querySelector(".cursor").innerHTML = "";
    hideTip();
  };
  for (const drawing of drawings) {
    drawing.onpointermove = drawing.onpointerdown = move;
    drawing.onpointerleave = leave;
  }
}
