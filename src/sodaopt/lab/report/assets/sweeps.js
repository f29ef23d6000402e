// Final loss against a swept setting, with one line for each optimizer.

const NAMES = { lr: "learning rate", wd: "weight decay" };

function sweepCharts(section, panels) {
  if (panels.length === 0) return;
  section.hidden = false;
  for (const panel of panels) section.querySelector(".panels").append(sweepChart(panel));
}

function sweepChart(panel) {
  const name = NAMES[panel.axis] ?? panel.axis;
  const holder = make("div", { class: "plot", role: "img" });
  holder.setAttribute("aria-label", `Final validation loss against ${name}. ${panel.traces.map(said).join(" ")}`);
  const chart = { u: null };
  const width = fit(holder, chart);
  const title = `Loss against ${name}${panel.title ? `, ${panel.title}` : ""}`;
  const box = make("div", { class: "panel" }, make("h3", {}, title), holder, sweepLegend(panel));
  for (const line of panel.notes) box.append(make("p", { class: "caption" }, line));
  const draw = () => {
    chart.u?.destroy();
    chart.u = sweepPlot(holder, width(), panel, name);
  };
  requestAnimationFrame(draw); // the width is known once the element is in the page
  all.push(draw);
  return box;
}

/** Describe a line in words. */
function said(trace) {
  const losses = trace.points.map((p) => p.loss).filter((y) => y != null);
  const gone = trace.points.filter((p) => p.diverged);
  if (!losses.length) return `${trace.label}: ${gone.length ? "diverged" : "unfinished"}.`;
  const where = trace.best ? `, best at ${trace.best}${trace.edge ? " (edge)" : ""}` : "";
  const lost = trace.level && gone.length ? ", a seed diverged" : "";
  return `${trace.label}: ${trace.lowest.toFixed(4)}${where}${lost}.`;
}

function sweepLegend(panel) {
  return make("ul", { class: "legend" }, ...panel.traces.map((trace) => {
    const words = said(trace).slice(trace.label.length + 2, -1);
    return make("li", {}, make("span", { class: "key" }, swatch(trace.colour),
      make("span", { class: "name" }, trace.label), make("span", { class: "value" }, words)));
  }));
}

// -- the plot ---------------------------------------------------------------------------------

function sweepPlot(holder, width, panel, name) {
  const xs = panel.ticks, ends = [xs[0] - 0.4, xs[xs.length - 1] + 0.4];
  const grid = [ends[0], ...xs, ends[1]];
  const ys = panel.traces.map((trace) => trace.level
    ? grid.map(() => trace.points[0].loss)
    : grid.map((x) => trace.points.find((p) => p.x === x)?.loss ?? null));
  const skip = Math.ceil((xs.length * 46) / Math.max(1, width - 70)); // show every skip-th name, so that none overlap
  return new uPlot({
    width, height: Math.round(Math.max(260, Math.min(340, width * 0.66))),
    legend: { show: false },
    cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
    scales: {
      x: { time: false, range: () => ends },
      y: { range: () => panel.range },
    },
    axes: [
      axis(name, { size: 36, splits: () => xs, values: () => panel.names.map((n, j) => (j % skip ? "" : n)) }),
      axis(narrow(width) ? null : "final loss", {
        size: narrow(width) ? 48 : 60, splits: (u, _, min, max) => ticks(min, max, room(u.bbox.height, 45)), values: (u, found) => found.map(tidy),
      }),
    ],
    series: [{}, ...panel.traces.map((trace) => ({
      label: trace.label, stroke: hue(trace.colour), width: 2, spanGaps: false,
      dash: trace.level ? [7, 5] : dashes(trace.colour),
      points: { show: !trace.level, size: 7, fill: hue(trace.colour), width: 1 },
    }))],
    hooks: { draw: [(u) => drawPoints(u, panel, grid)] },
    plugins: [tip((u) => sweepValues(u, panel, grid))],
  }, [grid, ...ys], holder);
}

/** Draw spreads and the best point of each line. Symbols at the top show diverged runs and high losses. */
function drawPoints(u, panel, grid) {
  const ctx = u.ctx, px = devicePixelRatio;
  const y = (loss) => u.valToPos(loss, "y", true);
  panel.traces.forEach((trace, place) => {
    // the symbols of several lines stand side by side
    const beside = (place - (panel.traces.length - 1) / 2) * 11 * px;
    ctx.strokeStyle = ctx.fillStyle = hue(trace.colour);
    ctx.lineWidth = 1.25 * px;
    ctx.setLineDash([]);
    for (const point of trace.points) {
      if (trace.level) { levelBand(u, point, grid, y); continue; }
      const x = u.valToPos(point.x, "x", true);
      if (point.spread) clipped(u, () => stroke(ctx, [[x, y(point.loss - point.spread)], [x, y(point.loss + point.spread)]]));
      if (point.fewer) hollow(ctx, x, y(point.loss), 3.5 * px);
      if (point.loss === trace.lowest && trace.best) ring(ctx, x, y(point.loss), 7.5 * px);
      if (point.diverged) cross(ctx, x + beside, u.bbox.top + 9 * px, 4 * px);
      else if (point.loss > panel.range[1]) triangle(ctx, x + beside, u.bbox.top + 8 * px, 4.5 * px);
    }
  });
}

function levelBand(u, point, grid, y) {
  if (!point.spread) return;
  const left = u.valToPos(grid[0], "x", true), right = u.valToPos(grid[grid.length - 1], "x", true);
  const top = y(point.loss + point.spread);
  clipped(u, (ctx) => {
    ctx.globalAlpha = 0.14;
    ctx.fillRect(left, top, right - left, y(point.loss - point.spread) - top);
  });
}

function stroke(ctx, points) {
  ctx.beginPath();
  for (const [x, y] of points) ctx.lineTo(x, y);
  ctx.stroke();
}

function ring(ctx, x, y, r) {
  ctx.beginPath();
  ctx.arc(x, y, r, 0, 2 * Math.PI);
  ctx.stroke();
}

function hollow(ctx, x, y, r) {
  ctx.save();
  ctx.fillStyle = css("--paper");
  ctx.lineWidth *= 1.3;
  ctx.beginPath();
  ctx.arc(x, y, r, 0, 2 * Math.PI);
  ctx.fill();
  ctx.stroke();
  ctx.restore();
}

function cross(ctx, x, y, r) {
  stroke(ctx, [[x - r, y - r], [x + r, y + r]]);
  stroke(ctx, [[x - r, y + r], [x + r, y - r]]);
}

function triangle(ctx, x, y, r) {
  ctx.beginPath();
  ctx.moveTo(x, y - r);
  ctx.lineTo(x + r, y + r);
  ctx.lineTo(x - r, y + r);
  ctx.fill();
}

function sweepValues(u, panel, grid) {
  const at = panel.ticks.indexOf(grid[u.cursor.idx]);
  if (at < 0) return null;
  const found = panel.traces.flatMap((trace) => {
    const point = trace.level ? trace.points[0] : trace.points.find((p) => p.x === panel.ticks[at]);
    return point ? [[trace.colour, point.label, point]] : [];
  }).sort((a, b) => (a[2].loss ?? Infinity) - (b[2].loss ?? Infinity));
  return { at: `${NAMES[panel.axis] ?? panel.axis} ${panel.names[at]}`,
    lines: found.map(([colour, name, point]) => [colour, name, measured(point)]) };
}

function measured(point) {
  if (point.loss == null) return point.diverged ? "diverged" : "unfinished";
  const lost = point.diverged ? `, ${point.diverged} of ${point.n + point.diverged} diverged` : "";
  return `${point.loss.toFixed(4)}${point.spread ? ` ± ${point.spread.toFixed(4)}` : ""}, n ${point.n}${lost}`;
}
