// The theme, and the charts of this page.

const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = null; // by the button. If null, the system decides

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
sweepCharts(document.getElementById("sweeps"), data.sweeps);
curveSections(data);
for (const table of document.querySelectorAll("table.long")) longTable(table);
