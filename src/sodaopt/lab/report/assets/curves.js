// Loss along the runs, against steps, tokens or time.

const AXES = { steps: "steps", tokens: "tokens", time: "seconds" };
const MANY = 8; // with more lines, only the best of each optimizer are shown at first

function curveChart(section, curves, title) {
  if (curves.length === 0) return;
  section.hidden = false;
  const best = curves.map((c) => curves.length <= MANY || c.main);
  const state = { x: "steps", log: { x: false, y: false }, shown: best };
  const holder = make("div", { class: "plot", role: "img" });
  const chart = { u: null };
  const width = fit(holder, chart);
  const draw = () => {
    chart.u?.destroy();
    holder.setAttribute("aria-label", `${title} of ${curves.length} variants against ${state.x}`);
    chart.u = curvePlot(holder, width(), curves, state);
  };
  const legend = curveLegend(curves, state, chart);
  const box = section.querySelector(".chart");
  box.replaceChildren(curveTools(curves, state, chart, draw, legend), holder, legend.list);
  if (curves.some((c) => c.low.length)) box.append(make("p", { class: "caption" }, "Lines are means over seeds, bands their range."));
  draw();
  all.push(draw);
}

function curveTools(curves, state, chart, draw, legend) {
  const known = Object.keys(AXES).filter((name) => curves.some((c) => c[AXES[name]].length));
  const tools = make("div", { class: "tools" },
    group("Horizontal axis", known, (name) => state.x === name, (name) => { state.x = name; draw(); }),
    group("Logarithmic axes", ["log x", "log y"], (name) => state.log[name.at(-1)], (name) => {
      state.log[name.at(-1)] = !state.log[name.at(-1)];
      draw();
    }),
    group("Part of the run", ["whole run", "last third"], null, (name) => zoom(chart.u, name)));
  if (curves.length > MANY) {
    tools.append(group("Lines", ["best", "all", "none"], null, (name) => legend.show((c) =>
      name === "all" || (name === "best" && c.main))));
  }
  tools.append(make("span", { class: "hint" }, "Drag to zoom, double-click to reset"));
  return tools;
}

function zoom(u, name) {
  const xs = u.data[0], last = xs[xs.length - 1];
  const first = name === "whole run" ? xs[0] : xs[0] + (last - xs[0]) * 2 / 3;
  u.setScale("x", { min: first, max: last });
}

function curveLegend(curves, state, chart) {
  const list = make("ul", { class: curves.length > MANY ? "legend many" : "legend" });
  const set = (j, shown) => {
    state.shown[j] = shown;
    buttons[j].setAttribute("aria-pressed", String(shown));
    chart.u?.setSeries(j + 1, { show: shown });
  };
  const buttons = curves.map((curve, j) => {
    const last = curve.loss[curve.loss.length - 1];
    const button = make("button", { type: "button", "aria-pressed": String(state.shown[j]) },
      swatch(curve.colour, curve.alone), make("span", { class: "name" }, curve.label),
      make("span", { class: "value" }, last.toFixed(4)));
    button.addEventListener("click", () => set(j, !state.shown[j]));
    button.addEventListener("mouseenter", () => state.shown[j] && chart.u.setSeries(j + 1, { focus: true }));
    button.addEventListener("mouseleave", () => chart.u.setSeries(null, { focus: true }));
    list.append(make("li", {}, button));
    return button;
  });
  return { list, show: (wanted) => curves.forEach((curve, j) => set(j, wanted(curve))) };
}

// -- the plot ---------------------------------------------------------------------------------

/** Show many seconds as minutes or hours. */
function unit(curves, name) {
  if (name !== "time") return { label: name, scale: 1 };
  const last = Math.max(...curves.map((c) => c.seconds[c.seconds.length - 1] || 0));
  if (last > 3 * 3600) return { label: "hours", scale: 1 / 3600 };
  return last > 300 ? { label: "minutes", scale: 1 / 60 } : { label: "seconds", scale: 1 };
}

/** Return [xs, losses, lows, highs] with increasing xs. */
function columns(curve, state, scale) {
  const xs = curve[AXES[state.x]].map((x) => x * scale);
  const kept = [];
  let last = state.log.x ? 0 : -Infinity;
  xs.forEach((x, j) => {
    if (x > last) { kept.push(j); last = x; }
  });
  const pick = (values) => (values.length ? kept.map((j) => values[j]) : []);
  return [pick(xs), pick(curve.loss), pick(curve.low), pick(curve.high)];
}

function curvePlot(holder, width, curves, state) {
  const x = unit(curves, state.x);
  const parts = curves.map((curve) => columns(curve, state, x.scale));
  const data = uPlot.join(parts.map(([xs, losses]) => [xs, losses]));
  const paints = curves.map((curve) => hue(curve.colour));
  const log = (on) => (on ? { distr: 3, log: 10 } : { distr: 1 });
  return new uPlot({
    width, height: Math.round(Math.max(280, Math.min(440, width * 0.52))),
    legend: { show: false },
    focus: { alpha: 0.2 },
    cursor: {
      y: false, points: { size: 7 }, drag: { x: true, y: false },
      dataIdx: (u, j, index) => (j === 0 ? index : nearest(u, j, index)),
    },
    scales: {
      x: { time: false, ...log(state.log.x), range: (u, min, max) => [min, max > min ? max : min + 1] },
      y: { ...log(state.log.y), range: (u) => reach(u, state) },
    },
    axes: [
      axis(x.label, {
        size: 36,
        splits: (u, _, min, max) => (state.log.x ? logTicks : ticks)(min, max, room(u.bbox.width, narrow(width) ? 55 : 90)),
        values: (u, found) => found.map(count), filter: (u, found) => found,
      }),
      axis(narrow(width) ? null : "loss", {
        size: narrow(width) ? 44 : 56,
        splits: (u, _, min, max) => (state.log.y ? logTicks : ticks)(min, max, room(u.bbox.height, 45)),
        values: (u, found) => found.map(tidy), filter: (u, found) => found,
      }),
    ],
    series: [{}, ...curves.map((curve, j) => ({
      label: curve.label, show: state.shown[j], stroke: paints[j], width: 2,
      dash: dashes(curve.colour, curve.alone), spanGaps: true, points: { show: curve.loss.length < 3, size: 6 },
    }))],
    hooks: { drawAxes: [(u) => clipped(u, (ctx) => bands(u, ctx, parts, paints, state))] },
    plugins: [tip((u) => values(u, curves, x.label))],
  }, data, holder);
}

/** Draw the range over seeds. */
function bands(u, ctx, parts, paints, state) {
  parts.forEach(([xs, , low, high], j) => {
    if (!low.length || !state.shown[j]) return;
    ctx.beginPath();
    xs.forEach((x, k) => ctx.lineTo(u.valToPos(x, "x", true), u.valToPos(high[k], "y", true)));
    for (let k = xs.length - 1; k >= 0; k--) {
      ctx.lineTo(u.valToPos(xs[k], "x", true), u.valToPos(low[k], "y", true));
    }
    ctx.globalAlpha = 0.16;
    ctx.fillStyle = paints[j];
    ctx.fill();
  });
}

/** Return the range of losses to show, without the steep start of a run. */
function reach(u, state) {
  const [from, to] = u.series[0].idxs ?? [0, u.data[0].length - 1];
  const xs = u.data[0], whole = from === 0 && !state.log.x;
  const settled = whole ? xs[from] + 0.15 * (xs[to] - xs[from]) : -Infinity;
  const lines = u.data.slice(1).filter((_, j) => state.shown[j]);
  const since = (start) => lines
    .map((ys) => ys.slice(from, to + 1).filter((y, k) => y != null && xs[from + k] >= start))
    .filter((ys) => ys.length);
  const rest = since(settled); // too few points to leave out the start
  const seen = rest.some((ys) => ys.length > 2) ? rest : since(-Infinity);
  if (!seen.length) return [0.1, 1];
  const min = seen.flat().reduce((a, b) => Math.min(a, b)), first = Math.max(...seen.map((ys) => ys[0]));
  let max = seen.flat().reduce((a, b) => Math.max(a, b));
  if (whole && first > min) max = Math.min(max, first + 0.25 * (first - min)); // cut off diverging lines
  const margin = 0.05 * (max - min) || 0.01 * Math.abs(max) || 0.1;
  return [state.log.y ? Math.max(min - margin, min / 2) : min - margin, max + margin];
}

/** Return the closest point of a line, or none before its first and after its last point. */
function nearest(u, j, index) {
  const xs = u.data[0], ys = u.data[j];
  let a = index, b = index;
  while (a >= 0 && ys[a] == null) a--;
  while (b < ys.length && ys[b] == null) b++;
  if (a < 0 || b >= ys.length) return null;
  return xs[index] - xs[a] <= xs[b] - xs[index] ? a : b;
}

function values(u, curves, label) {
  if (u.cursor.idx == null) return null;
  const found = curves.map((curve, j) => {
    const k = u.cursor.idxs[j + 1];
    return u.series[j + 1].show && k != null ? [curve.colour, curve.label, u.data[j + 1][k]] : null;
  }).filter(Boolean).sort((a, b) => a[2] - b[2]);
  const lines = found.slice(0, 10).map(([colour, name, y]) => [colour, name, y.toFixed(4)]);
  const at = u.data[0][u.cursor.idx];
  return { at: `${label === "tokens" ? count(at) : tidy(at)} ${label}`, lines };
}
