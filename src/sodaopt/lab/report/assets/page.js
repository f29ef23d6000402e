// The theme, and the charts of this page.

const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = null; // the theme that the button has set. If null, the system decides

/** Set the theme and draw the charts again, because canvases do not follow style sheets. */
function paint(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  for (const draw of all) draw();
}

document.getElementById("theme").addEventListener("click", () => {
  const dark = chosen ? chosen === "dark" : system.matches;
  chosen = dark ? "light" : "dark";
  paint(chosen);
});
system.addEventListener("change", () => paint(chosen));
addEventListener("beforeprint", () => paint("light")); // paper is white
addEventListener("afterprint", () => paint(chosen));

const data = JSON.parse(document.getElementById("data").textContent);
restoreView();
sweepCharts(document.getElementById("sweeps"), data.sweeps);
curveSections(data);
for (const table of document.querySelectorAll("table.long")) longTable(table);
fitColumns();
addEventListener("resize", fitColumns);
copyButtons(document.querySelector("header .copies"), data.copies);
for (const cell of document.querySelectorAll(".heat .best")) { // scroll to it on a narrow screen
  const frame = cell.closest(".wide");
  frame.scrollLeft = cell.offsetLeft - (frame.clientWidth - cell.offsetWidth) / 2;
}

// While runs go on, the page reloads itself. It keeps the reader's choices and scroll position.

function restoreView() {
  const kept = JSON.parse(stored("getItem") ?? "null");
  if (!kept) return;
  Object.assign(view, kept.view);
  for (const [label, on] of kept.shown) shown.set(label, on);
  if (kept.theme) { chosen = kept.theme; document.documentElement.dataset.theme = chosen; }
  addEventListener("load", () => scrollTo(0, kept.scroll));
}

addEventListener("pagehide", () => stored("setItem",
  JSON.stringify({ view, shown: [...shown], theme: chosen, scroll: scrollY })));

/** Read or write the storage of this tab, if the browser allows it. */
function stored(action, ...rest) {
  try { return sessionStorage[action](location.pathname, ...rest); } catch { return null; }
}

/** Add buttons that copy a text. Some browsers close the clipboard to a page that is a file. */
function copyButtons(box, copies) {
  for (const [name, text] of Object.entries(copies)) {
    const button = make("button", { type: "button" }, `Copy ${name}`);
    button.addEventListener("click", async () => {
      const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
      const copied = done || copyBySelection(text);
      button.textContent = copied ? "Copied" : "Could not copy";
      setTimeout(() => { button.textContent = `Copy ${name}`; }, 1500);
    });
    box.append(button);
  }
}

/** Copy a text without the clipboard API. Return whether this worked. */
function copyBySelection(text) {
  const area = make("textarea", { "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}
