// Functions that all charts use: colours, ticks, numbers, the legend and the box at the cursor.

const DASHES = [[], [9, 4], [2, 3], [12, 4, 3, 4], [6, 3, 1, 3]];
const HUES = 8;
const all = []; // functions that draw each chart again, such as in another theme

const probe = document.body.appendChild(make("span", { hidden: "" }));
/** Return a colour of the style sheet in the current theme, because a canvas does not know style sheets. */
function css(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
const hue = (colour) => css(`--hue${colour % HUES}`);
/** Return the dashes of a line. alone: it is one diverged seed of a variant with other seeds. */
const dashes = (colour, alone) => (alone ? [1, 4] : DASHES[Math.floor(colour / HUES) % DASHES.length]);
const font = () => `12px ${getComputedStyle(document.body).fontFamily}`;

/** Make an element. Text is never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function swatch(colour, alone = false) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const line = document.createElementNS(space, "line");
  const set = (element, values) => {
    for (const name in values) element.setAttribute(name, values[name]);
  };
  set(svg, { class: `swatch hue${colour % HUES}`, viewBox: "0 0 22 8", "aria-hidden": "true" });
  const dash = dashes(colour, alone).map((n) => n * 0.75).join(" ");
  set(line, { x1: 1, y1: 4, x2: 21, y2: 4, "stroke-dasharray": dash });
  svg.append(line);
  return svg;
}

/** Make a group of buttons. press(name) is called by a click, and pressed(name) is its state. */
function group(label, names, pressed, press) {
  const box = make("div", { class: "group", role: "group", "aria-label": label });
  const buttons = names.map((name) => {
    const button = make("button", { type: "button" }, name);
    button.addEventListener("click", () => { press(name); update(); });
    box.append(button);
    return button;
  });
  const update = () => buttons.forEach((button, j) => button.setAttribute("aria-pressed", String(pressed(names[j]))));
  update();
  watchers.push(update);
  return box;
}

// -- numbers ----------------------------------------------------------------------------------

const tidy = (x) => String(Number(x.toPrecision(4))).replace("-", "−");

/** Format a count: 15000 -> "15k" */
function count(x) {
  const units = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]];
  for (const [size, unit] of units) {
    if (Math.abs(x) >= size) return tidy(x / (unit === "k" ? 1e3 : size)) + unit;
  }
  return tidy(x);
}

/** Return about n round numbers from min to max. */
function ticks(min, max, n) {
  const rough = (max - min) / Math.max(1, n);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= 0.7 * rough);
  const first = Math.ceil(min / step - 1e-9), last = Math.floor(max / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, j) => (first + j) * step);
}

/** Return 1, 2, 5, 10, 20, ... on a log axis, or round numbers if these are fewer than three. */
function logTicks(min, max, n) {
  const found = [];
  for (let p = Math.floor(Math.log10(min)); p <= Math.ceil(Math.log10(max)); p++) {
    for (const k of [1, 2, 5]) if (k * 10 ** p >= min && k * 10 ** p <= max) found.push(k * 10 ** p);
  }
  const tens = found.filter((x) => Math.abs(Math.log10(x) % 1) < 1e-9);
  if (found.length > 2 * n && tens.length > 2) return tens;
  return found.length >= 3 ? found : ticks(min, max, n);
}

// -- parts of a chart -------------------------------------------------------------------------

const narrow = (width) => width < 480;
/** Return the number of ticks that fit, if each one needs `each` pixels. */
const room = (pixels, each) => Math.max(2, Math.floor(pixels / devicePixelRatio / each));

function axis(label, extra) {
  const line = css("--grid");
  return {
    label, font: font(), labelFont: font(), stroke: css("--soft"), labelGap: 2, labelSize: 22,
    grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 5 }, ...extra,
  };
}

/** Draw inside the axes only. */
function clipped(u, draw) {
  const { left, top, width, height } = u.bbox;
  u.ctx.save();
  u.ctx.beginPath();
  u.ctx.rect(left, top, width, height);
  u.ctx.clip();
  draw(u.ctx);
  u.ctx.restore();
}

/** Return a plugin that shows a box at the cursor.
 *
 * lines(u) returns null, or {at, lines} with a heading and [colour, name, value] for each line. */
function tip(lines) {
  const box = make("div", { class: "tip", hidden: "" });
  const move = (u) => {
    const { left } = u.cursor;
    const found = left >= 0 ? lines(u) : null;
    box.hidden = !found || found.lines.length === 0;
    if (box.hidden) return;
    const rows = found.lines.map(([colour, name, value]) => make("div", {}, swatch(colour),
      make("span", {}, name), make("span", { class: "value" }, value)));
    box.replaceChildren(make("div", { class: "at" }, found.at), ...rows);
    const free = u.over.clientWidth - box.offsetWidth;
    const x = left + 18 > free ? left - box.offsetWidth - 18 : left + 18;
    // at the top, because falling losses are below
    box.style.transform = `translate(${Math.max(Math.min(0, free), x)}px, 0)`;
  };
  return { hooks: { init: [(u) => u.over.append(box)], setCursor: [move] } };
}

/** Resize a chart with its holder. Return a function that returns the current width. */
function fit(holder, chart) {
  const width = () => Math.max(200, Math.floor(holder.clientWidth));
  new ResizeObserver(() => {
    if (chart.u && chart.u.width !== width()) chart.u.setSize({ width: width(), height: chart.u.height });
  }).observe(holder);
  return width;
}
