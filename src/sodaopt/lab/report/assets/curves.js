// Quantities along the runs, against steps, tokens or time. All charts share the axis and the zoom.

const AXES = { steps: "steps", tokens: "tokens", time: "seconds" };
const MANY = 8; // with more lines, only the best of each optimizer are shown at first
const SMOOTHING = { none: 0, "1 %": 0.01, "2 %": 0.02, "5 %": 0.05, "10 %": 0.1 };
const view = { x: "steps", logX: false, zoom: [0, 1], smooth: "2 %", role: null };
const plots = []; // every curve chart: { draw, chart, curves }
const shown = new Map(); // label -> whether its lines are drawn
const watchers = []; // functions that are called when a setting of the charts changes

/** Switch the lines of a variant on or off in every chart. */
function show(label, on) {
  shown.set(label, on);
  for (const { chart, curves } of plots) {
    curves().forEach((curve, j) => curve.label === label && chart.u?.setSeries(j + 1, { show: on }));
    chart.u?.setSeries(null, { focus: true }); // a hidden line must not keep the focus
  }
  for (const watch of watchers) watch();
}

function redraw() {
  for (const { draw } of plots) draw();
  for (const watch of watchers) watch();
}

/** Decide which lines are shown at first. */
function register(curves) {
  for (const c of curves) if (!shown.has(c.label)) shown.set(c.label, curves.length <= MANY || c.main);
}

/** Draw the lines that `curves()` returns, and draw them again when the view changes.
 *
 * options: title, height, logY
 *   unit: the title of the vertical axis, if it has one
 *   labels: whether lines have names at their right ends
 *   zero: whether the axis includes zero, with a line there
 *   settle: whether the steep start of a run is left out
 *   format: a function that formats a value */
function curveChart(box, curves, options) {
  const state = { logY: false, ...options };
  const holder = make("div", { class: "plot", tabindex: "0", role: "group" });
  const spoken = make("p", { class: "spoken", "aria-live": "polite" });
  const chart = { u: null };
  const width = fit(holder, chart);
  const draw = () => {
    chart.u?.destroy();
    holder.setAttribute("aria-label", `${options.title} against ${view.x}. Arrow keys read the values.`);
    chart.u = curvePlot(holder, width(), curves(), state);
    if (view.zoom[0] > 0 || view.zoom[1] < 1) setZoom(chart.u, view.zoom);
    state.ready = true;
  };
  readable(holder, chart, spoken);
  box.append(holder, spoken);
  plots.push({ draw, chart, curves });
  all.push(draw);
  draw();
  return { draw, state };
}

// -- controls ---------------------------------------------------------------------------------

function axisTools(curves) {
  const known = Object.keys(AXES).filter((name) => curves.some((c) => c[AXES[name]].length));
  const parts = { "whole run": [0, 1], "last third": [2 / 3, 1] };
  const is = (zoom) => zoom.every((x, j) => Math.abs(x - view.zoom[j]) < 0.005);
  const tools = make("div", { class: "tools" },
    group("Horizontal axis", known, (name) => view.x === name, (name) => { view.x = name; redraw(); }),
    group("Logarithmic axis", ["log x"], () => view.logX, () => { view.logX = !view.logX; redraw(); }),
    group("Part of the run", Object.keys(parts), (name) => is(parts[name]), (name) => zoomAll(parts[name])));
  if (curves.length > MANY) {
    const main = (c) => c.main, lines = { best: main, all: () => true, none: () => false };
    const now = (name) => curves.every((c) => shown.get(c.label) === Boolean(lines[name](c)));
    tools.append(group("Lines", Object.keys(lines), now, (name) => {
      for (const c of curves) show(c.label, Boolean(lines[name](c)));
    }));
  }
  tools.append(make("span", { class: "hint" }, "Drag to zoom, double-click to reset"));
  return tools;
}

function logTool(plot) {
  return group("Logarithmic axis", ["log y"], () => plot.state.logY, () => {
    plot.state.logY = !plot.state.logY;
    plot.draw();
  });
}

/** The legend of up to eight lines. With more lines, the rows of the table switch them. */
function curveLegend(curves) {
  const list = make("ul", { class: "legend" });
  curves.forEach((curve) => {
    const last = curve.loss[curve.loss.length - 1];
    const button = make("button", { type: "button" }, swatch(curve.colour, curve.alone),
      make("span", { class: "name" }, curve.label), make("span", { class: "value" }, last.toFixed(4)));
    button.addEventListener("click", () => show(curve.label, !shown.get(curve.label)));
    button.addEventListener("mouseenter", () => focusLine(shown.get(curve.label) ? curve.label : null));
    button.addEventListener("mouseleave", () => focusLine(null));
    const update = () => button.setAttribute("aria-pressed", String(shown.get(curve.label)));
    watchers.push(update);
    update();
    list.append(make("li", {}, button));
  });
  return list;
}

function focusLine(label) {
  for (const { chart, curves } of plots) {
    const at = curves().findIndex((c) => c.label === label);
    chart.u?.setSeries(at < 0 ? null : at + 1, { focus: true });
  }
}

// -- zoom -------------------------------------------------------------------------------------

const ends = (u) => [u.data[0][0], u.data[0][u.data[0].length - 1]];

function setZoom(u, [a, b]) {
  const [first, last] = ends(u);
  u.setScale("x", { min: first + a * (last - first), max: first + b * (last - first) });
}

let zooming = false;
function zoomAll(zoom) {
  view.zoom = zoom;
  zooming = true; // setZoom makes each chart call zoomed
  for (const { chart } of plots) if (chart.u) setZoom(chart.u, zoom);
  zooming = false;
  for (const watch of watchers) watch();
}

/** Zoom all charts to the fractions of the run to which the reader has zoomed one. */
function zoomed(u, key, state) {
  if (key !== "x" || zooming || !state.ready) return;
  const [first, last] = ends(u), { min, max } = u.scales.x;
  if (!(last > first) || min == null) return;
  const zoom = [Math.max(0, (min - first) / (last - first)), Math.min(1, (max - first) / (last - first))];
  if (zoom.every((x, j) => Math.abs(x - view.zoom[j]) < 1e-6)) return;
  queueMicrotask(() => zoomAll(zoom));
}

// -- keyboard ---------------------------------------------------------------------------------

/** Let arrow keys move the cursor from point to point. A screen reader reads the values. */
function readable(holder, chart, spoken) {
  holder.addEventListener("keydown", (event) => {
    const u = chart.u, count = u.data[0].length, far = event.shiftKey ? 10 : 1;
    const from = u.cursor.idx ?? (event.key === "ArrowLeft" ? count : -1);
    const to = { ArrowRight: from + far, ArrowLeft: from - far, Home: 0, End: count - 1 }[event.key];
    if (event.key === "Escape") return u.setCursor({ left: -10, top: -10 });
    if (to === undefined) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(count - 1, to));
    u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: u.over.clientHeight / 2 });
    const found = u.read(u);
    if (found) spoken.textContent = `${found.at}: ${found.lines.map(([, name, y]) => `${name} ${y}`).join(", ")}`;
  });
}

// -- the plot ---------------------------------------------------------------------------------

/** Return the unit of the horizontal axis. Many seconds are shown as minutes or hours. */
function unit(curves, name) {
  if (name !== "time") return { label: name, scale: 1 };
  const last = Math.max(...curves.map((c) => c.seconds[c.seconds.length - 1] || 0));
  if (last > 3 * 3600) return { label: "hours", scale: 1 / 3600 };
  return last > 300 ? { label: "minutes", scale: 1 / 60 } : { label: "seconds", scale: 1 };
}

/** Return [xs, values, lows, highs] with increasing xs. */
function columns(curve, scale) {
  const xs = curve[AXES[view.x]].map((x) => x * scale);
  const kept = [];
  let last = view.logX ? 0 : -Infinity;
  xs.forEach((x, j) => {
    if (x > last) { kept.push(j); last = x; }
  });
  const pick = (values) => (values.length ? kept.map((j) => values[j]) : []);
  return [pick(xs), pick(curve.loss), pick(curve.low), pick(curve.high)];
}

/** Return the exponential average over a fraction of the run, without a bias to the first value. */
function smooth(values, fraction) {
  const keep = 1 - 1 / Math.max(1, fraction * values.length);
  let total = 0, weight = 0;
  return values.map((v) => {
    total = keep * total + v;
    weight = keep * weight + 1;
    return total / weight;
  });
}

function curvePlot(holder, width, curves, state) {
  const x = unit(curves, view.x), format = state.format ?? ((y) => y.toFixed(4));
  const parts = curves.map((curve) => columns(curve, x.scale));
  const data = uPlot.join(parts.map(([xs, ys]) => [xs, ys]));
  const paints = curves.map((curve) => hue(curve.colour));
  const named = state.labels && !narrow(width) ? endLabels(curves, paints) : { width: 0 };
  const log = (on) => (on ? { distr: 3, log: 10 } : { distr: 1 });
  const lines = (u) => values(u, curves, x.label, format);
  const u = new uPlot({
    width, height: state.height ?? Math.round(Math.max(280, Math.min(440, width * 0.52))),
    padding: [null, named.width || null, null, null],
    legend: { show: false },
    focus: { alpha: 0.2 },
    cursor: {
      y: false, points: { size: 7 }, drag: { x: true, y: false }, sync: { key: "page", scales: ["x", null] },
      dataIdx: (u, j, index) => (j === 0 ? index : nearest(u, j, index)),
    },
    scales: {
      x: { time: false, ...log(view.logX), range: (u, min, max) => [min, max > min ? max : min + 1] },
      y: { ...log(state.logY), range: (u) => reach(u, curves, state) },
    },
    axes: [
      axis(x.label, {
        size: 36,
        splits: (u, _, min, max) => (view.logX ? logTicks : ticks)(min, max, room(u.bbox.width, narrow(width) ? 55 : 90)),
        values: (u, found) => found.map(count), filter: (u, found) => found,
      }),
      axis(narrow(width) || !state.unit ? null : state.unit, {
        size: narrow(width) || !state.unit ? 50 : 56,
        splits: (u, _, min, max) => (state.logY ? logTicks : ticks)(min, max, room(u.bbox.height, 45)),
        values: (u, found) => found.map(tidy), filter: (u, found) => found,
      }),
    ],
    series: [{}, ...curves.map((curve, j) => ({
      label: curve.label, show: shown.get(curve.label), stroke: paints[j], width: 2,
      dash: dashes(curve.colour, curve.alone), spanGaps: true, points: { show: curve.loss.length < 3, size: 6 },
    }))],
    hooks: {
      drawAxes: [(u) => clipped(u, (ctx) => { if (state.zero) zeroLine(u, ctx); bands(u, ctx, curves, parts, paints); })],
      draw: named.draw ? [named.draw] : [],
      setScale: [(u, key) => zoomed(u, key, state)],
    },
    plugins: [tip(lines)],
  }, data, holder);
  u.read = lines;
  return u;
}

/** Draw the bands of the lines: the range over seeds, or the interval. */
function bands(u, ctx, curves, parts, paints) {
  parts.forEach(([xs, , low, high], j) => {
    if (!low.length || !shown.get(curves[j].label)) return;
    ctx.beginPath();
    xs.forEach((x, k) => ctx.lineTo(u.valToPos(x, "x", true), u.valToPos(high[k], "y", true)));
    for (let k = xs.length - 1; k >= 0; k--) {
      ctx.lineTo(u.valToPos(xs[k], "x", true), u.valToPos(low[k], "y", true));
    }
    ctx.globalAlpha = 0.16;
    ctx.fillStyle = paints[j];
    ctx.fill();
    ctx.globalAlpha = 1;
  });
}

function zeroLine(u, ctx) {
  const y = u.valToPos(0, "y", true);
  ctx.strokeStyle = css("--soft");
  ctx.lineWidth = 1.5 * devicePixelRatio;
  stroke(ctx, [[u.bbox.left, y], [u.bbox.left + u.bbox.width, y]]);
}

/** Name each line at its right end. Names that would overlap are moved apart. */
function endLabels(curves, paints) {
  const ctx = document.createElement("canvas").getContext("2d");
  ctx.font = font();
  const text = (label) => (label.length > 26 ? `${label.slice(0, 25)}…` : label);
  const lines = curves.filter((c) => shown.get(c.label) && !c.alone);
  const width = Math.max(0, ...lines.map((c) => ctx.measureText(text(c.label)).width)) + 22;
  const draw = (u) => {
    const px = devicePixelRatio, gap = 15 * px, { left, top, width: wide, height } = u.bbox;
    const [from, to] = u.series[0].idxs ?? [0, u.data[0].length - 1];
    const found = curves.map((curve, j) => {
      let at = to;
      while (at >= from && u.data[j + 1][at] == null) at--;
      return { curve, paint: paints[j], y: at < from ? NaN : u.valToPos(u.data[j + 1][at], "y", true) };
    }).filter(({ curve, y }) => shown.get(curve.label) && !curve.alone && y >= top - 2 && y <= top + height + 2);
    found.sort((a, b) => a.y - b.y);
    found.forEach((one, j) => { one.at = Math.max(one.y, j ? found[j - 1].at + gap : top + 6 * px); });
    for (let j = found.length - 1, most = top + height; j >= 0; j--, most -= gap) found[j].at = Math.min(found[j].at, most);
    u.ctx.save();
    u.ctx.font = font().replace("12px", `${12 * px}px`);
    u.ctx.textBaseline = "middle";
    u.ctx.textAlign = "left";
    for (const { curve, paint, y, at } of found) {
      u.ctx.strokeStyle = paint;
      u.ctx.lineWidth = 1.5 * px;
      stroke(u.ctx, [[left + wide + 2 * px, y], [left + wide + 10 * px, at]]);
      u.ctx.fillStyle = css("--ink");
      u.ctx.fillText(text(curve.label), left + wide + 14 * px, at);
    }
    u.ctx.restore();
  };
  return lines.length ? { width, draw } : { width: 0 };
}

/** Return the range of values to show. A loss is shown without the steep start of a run. */
function reach(u, curves, state) {
  const [from, to] = u.series[0].idxs ?? [0, u.data[0].length - 1];
  const xs = u.data[0], whole = from === 0 && !view.logX && state.settle;
  const settled = whole ? xs[from] + 0.15 * (xs[to] - xs[from]) : -Infinity;
  const lines = u.data.slice(1).filter((_, j) => shown.get(curves[j].label));
  const since = (start) => lines
    .map((ys) => ys.slice(from, to + 1).filter((y, k) => y != null && xs[from + k] >= start))
    .filter((ys) => ys.length);
  const rest = since(settled);
  const seen = rest.some((ys) => ys.length > 2) ? rest : since(-Infinity); // too few points without the start
  if (!seen.length) return [0.1, 1];
  let min = seen.flat().reduce((a, b) => Math.min(a, b)), max = seen.flat().reduce((a, b) => Math.max(a, b));
  const first = Math.max(...seen.map((ys) => ys[0]));
  if (whole && !state.zero && first > min) max = Math.min(max, first + 0.25 * (first - min)); // cut off diverging lines
  if (state.zero) { min = Math.min(min, 0); max = Math.max(max, 0); }
  const margin = (state.zero ? 0.25 : 0.05) * (max - min) || 0.01 * Math.abs(max) || 0.1;
  return [state.logY ? Math.max(min - margin, min / 2) : min - margin, max + margin];
}

/** Return the closest point of a line, or null before its first and after its last point. */
function nearest(u, j, index) {
  const xs = u.data[0], ys = u.data[j];
  let a = index, b = index;
  while (a >= 0 && ys[a] == null) a--;
  while (b < ys.length && ys[b] == null) b++;
  if (a < 0 || b >= ys.length) return null;
  return xs[index] - xs[a] <= xs[b] - xs[index] ? a : b;
}

/** Return the values of up to ten lines at the cursor, for the box of `tip`. */
function values(u, curves, label, format) {
  if (u.cursor.idx == null) return null;
  const found = curves.map((curve, j) => {
    const k = u.cursor.idxs[j + 1];
    return u.series[j + 1].show && k != null ? [curve.colour, curve.label, u.data[j + 1][k]] : null;
  }).filter(Boolean).sort((a, b) => a[2] - b[2]);
  const lines = found.slice(0, 10).map(([colour, name, y]) => [colour, name, format(y)]);
  const at = u.data[0][u.cursor.idx];
  return { at: `${label === "tokens" ? count(at) : tidy(at)} ${label}`, lines };
}
