// The sections of curves: the gap to the baseline, validation loss, dynamics and training loss.

const gapText = (y) => `${y < 0 ? "−" : "+"}${Math.abs(y).toFixed(4)}`;
const shortText = (y) => tidy(y);

function curveSections(data) {
  const every = [...data.val, ...data.train];
  register(data.val.length ? data.val : data.train);
  for (const c of every) if (!shown.has(c.label)) shown.set(c.label, false);
  const first = data.gap.length ? "gap" : data.val.length ? "val" : "train";
  const begin = (name) => {
    const section = document.getElementById(name), box = section.querySelector(".chart");
    section.hidden = false;
    if (name === first) box.append(axisTools(every.length ? (data.val.length ? data.val : data.train) : []));
    return box;
  };
  if (data.gap.length) gapSection(begin("gap"), data.gap);
  if (data.val.length) lossSection(begin("val"), data.val, "Validation loss", () => data.val);
  if (Object.keys(data.dynamics).length) dynamicsSection(begin("dynamics"), data);
  if (data.train.length) trainSection(begin("train"), data.train);
}

function gapSection(box, curves) {
  curveChart(box, () => curves, { title: "Difference to the baseline", unit: "difference", labels: true, zero: true, settle: true, format: gapText });
  const band = curves.some((c) => c.low.length) ? " Bands are 95 % intervals of the paired differences." : "";
  box.append(make("p", { class: "caption" }, `Validation loss minus that of the baseline, averaged over the seeds that both have. Below zero is better.${band}`));
}

function lossSection(box, all, title, curves) {
  const plot = curveChart(box, curves, { title, unit: "loss", labels: true, settle: true });
  box.insertBefore(make("div", { class: "tools" }, logTool(plot)), box.querySelector(".plot"));
  if (all.length <= MANY) box.append(curveLegend(all));
  else box.append(make("p", { class: "caption" }, "Click a name in the table above to switch its line on or off."));
  if (all.some((c) => c.low.length)) box.append(make("p", { class: "caption" }, "Lines are means over seeds, and bands are their range."));
  return plot;
}

/** Draw small charts of the diagnostics of one role, with a common cursor. */
function dynamicsSection(box, { dynamics, titles }) {
  const roles = Object.keys(dynamics);
  if (!roles.includes(view.role)) view.role = roles[0];
  const grid = make("div", { class: "multiples" });
  if (roles.length > 1) {
    box.append(make("div", { class: "tools" }, group("Parameters", roles, (r) => view.role === r, (r) => { view.role = r; redraw(); })));
  }
  box.append(grid);
  for (const name of Object.keys(titles)) {
    const cell = make("div", { class: "multiple" }, make("h3", {}, titles[name]));
    grid.append(cell);
    requestAnimationFrame(() => curveChart(cell, () => dynamics[view.role][name] ?? [], { title: titles[name], height: 190, format: shortText }));
  }
}

function trainSection(box, raw) {
  const smoothed = () => raw.map((c) => ({ ...c, loss: smooth(c.loss, SMOOTHING[view.smooth]) }));
  let now = smoothed();
  const plot = curveChart(box, () => now, { title: "Training loss", unit: "loss", labels: true, settle: true });
  const tools = make("div", { class: "tools" }, logTool(plot), make("span", {}, "Smoothing"),
    group("Smoothing", Object.keys(SMOOTHING), (name) => view.smooth === name, (name) => { view.smooth = name; now = smoothed(); plot.draw(); }));
  box.insertBefore(tools, box.querySelector(".plot"));
}
