// Histogram of units by the fraction of steps at which they are active.
function histogram(plot, data) {
  const width = plot.clientWidth, left = 46, right = 6, top = 12, height = 200, hues = [0, 2, 3, 1];
  const bins = data.layers[0].bins.length, slots = bins + 4; // never active, a gap, the bins, a gap, always active
  const slot = (width - left - right) / slots;
  const bars = [];
  const total = (count) => data.layers.reduce((sum, layer) => sum + count(layer), 0);
  const stack = (place, count, description, alarm) => {
    let below = 0;
    data.layers.forEach((layer, i) => {
      const units = count(layer);
      if (units) bars.push({ place, below, units, description, colour: alarm ? "var(--alarm)" : `var(--hue${hues[i % 4]})`, name: layer.name });
      below += units;
    });
    return below;
  };
  let most = 1;
  for (let b = 0; b < bins; b++)
    most = Math.max(most, stack(b + 2, (l) => l.bins[b], `active at ${Math.round((100 * b) / bins)} to ${Math.round((100 * (b + 1)) / bins)} % of steps`, false));
  most = Math.max(most, stack(0, (l) => l.never, "never active", true), stack(slots - 1, (l) => l.always, "always active", true));
  const y = (units) => top + height - (units / (1.12 * most)) * height;
  let svg = "";
  for (const mark of ticks(0, 1.12 * most, 4).filter(Number.isInteger))
    svg += `<line x1="${left}" x2="${width - right}" y1="${y(mark)}" y2="${y(mark)}" class="grid"/><text x="${left - 7}" y="${y(mark) + 4}" class="tick end">${mark}</text>`;
  bars.forEach((bar, i) => {
    svg += `<rect data-bar="${i}" x="${left + bar.place * slot + 0.06 * slot}" width="${0.88 * slot}" y="${y(bar.below + bar.units)}" height="${Math.max(1, y(bar.below) - y(bar.below + bar.units))}" style="fill:${bar.colour}"/>`;
  });
  const at = (share) => left + (2 + share * bins) * slot;
  svg += `<line x1="${at(data.mean)}" x2="${at(data.mean)}" y1="${top + 6}" y2="${top + height}" class="rule"/>`;
  svg += `<text x="${at(data.mean) + 5}" y="${top + 15}" class="tick">mean</text>`;
  for (const share of [0, 0.25, 0.5, 0.75, 1]) svg += `<text x="${at(share)}" y="${top + height + 16}" class="tick middle">${100 * share} %</text>`;
  const edge = (place, number, label, anchor) =>
    `<text x="${place}" y="${top + height + 34}" class="tick ${anchor} ${number ? "alarm" : ""}">${number} ${label}</text>`;
  svg += edge(left, total((l) => l.never), "never active", "") + edge(width - right, total((l) => l.always), "always active", "end");
  svg += `<text x="${(left + width) / 2}" y="${top + height + 52}" class="tick middle">fraction of steps with an event</text>`;
  const legend = data.layers.length > 1
    ? `<div class="legend">${data.layers.map((l, i) => `<span><i style="border-color:var(--hue${hues[i % 4]})"></i>${escape(l.name)}</span>`).join("")}</div>` : "";
  plot.innerHTML = `<h3>${escape(data.title)}</h3>${legend}<svg width="${width}" height="${top + height + 58}">${svg}</svg>`;
  const drawing = plot.querySelector("svg");
  drawing.onpointermove = (event) => {
    const bar = bars[event.target.dataset.bar];
    if (!bar) return hideTip();
    showTip(`<b>${bar.units} ${bar.units === 1 ? "unit" : "units"}</b> of ${escape(bar.name)}<br>${bar.description}`, event);
  };
  drawing.onpointerdown = drawing.onpointermove;
  drawing.onpointerleave = (event) => { if (event.pointerType !== "touch") hideTip(); };
}
