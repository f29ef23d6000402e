// The table of variants fits its frame. Readers sort and filter a long one, and switch lines on and off.

/** Leave out columns in the order of data-drop, until the table is no wider than its frame. */
function fitColumns() {
  const table = document.querySelector(".results"), frame = table.parentElement;
  const order = [...table.tHead.rows[0].cells].map((head) => +head.dataset.drop || Infinity);
  for (let last = 0; last <= order.length; last++) {
    for (const row of table.rows) order.forEach((drop, j) => row.cells[j].classList.toggle("dropped", drop <= last));
    if (frame.scrollWidth <= frame.clientWidth) return;
  }
}

function longTable(table) {
  const rows = [...table.tBodies[0].rows];
  const search = make("input", { type: "search", placeholder: "Filter, such as adamw lr=2⁻⁹", "aria-label": "Filter the variants" });
  const found = make("span", { class: "soft", "aria-live": "polite" });
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter((row) => {
      const text = row.cells[0].textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      return !row.hidden;
    });
    found.textContent = `${kept.length} of ${rows.length} variants`;
  };
  search.addEventListener("input", filter);
  table.parentElement.before(make("div", { class: "tools" }, search, found));
  filter();
  [...table.tHead.rows[0].cells].forEach((head, column) => sortable(table, rows, head, column));
  rows.forEach(lineSwitch);
}

function sortable(table, rows, head, column) {
  const button = make("button", { type: "button" }, ...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)], both = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
      if ((x === "") !== (y === "")) return x === "" ? 1 : -1; // rows without a value come last
      return (up ? 1 : -1) * (both ? x - y : x.localeCompare(y, "en", { numeric: true }));
    };
    table.tBodies[0].append(...rows.sort(order));
  });
}

/** Make the name of a row a button that switches its lines on and off. */
function lineSwitch(row) {
  const head = row.cells[0], label = row.dataset.variant;
  if (!shown.has(label)) return;
  const button = make("button", { type: "button", class: "line" }, ...head.childNodes);
  head.append(button);
  const update = () => button.setAttribute("aria-pressed", String(shown.get(label)));
  button.addEventListener("click", () => show(label, !shown.get(label)));
  watchers.push(update);
  update();
}
