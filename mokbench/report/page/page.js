"use strict";
// A chart fits the page's width; one that had to shrink for it gets a button that draws it at its
// full size, to be scrolled.
const shrunk = (svg) => svg.clientWidth + 1 < (svg.viewBox.baseVal.width * 4) / 3;
const charts = [...document.querySelectorAll(".chart")].map((chart) => {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "enlarge";
  const say = () => {
    const large = chart.classList.contains("large");
    button.textContent = large ? "fit to width" : "full size";
    button.setAttribute("aria-pressed", String(large));
  };
  button.addEventListener("click", () => {
    chart.classList.toggle("large");
    say();
  });
  say();
  chart.after(button);
  return [chart, button];
});
const offer = () => {
  for (const [chart, button] of charts) {
    button.hidden = !chart.classList.contains("large") && !shrunk(chart.querySelector("svg"));
  }
};
window.addEventListener("resize", offer);
offer();
// Sorting by a click on a heading, filters by text and by the values of marked columns. Without
// scripts the tables are whole and in the report's order.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const headings = [...table.tHead.rows[0].cells];
  const value = (row, i) => {
    const cell = row.cells[i];
    if (cell.dataset.s !== undefined) return Number(cell.dataset.s);
    const text = cell.textContent.trim();
    if (!headings[i].classList.contains("n")) return text;
    const number = Number.parseFloat(text.replace("~", ""));
    return Number.isNaN(number) ? Infinity : number;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number"
      ? (a === b ? 0 : a - b)
      : String(a).localeCompare(String(b), undefined, { numeric: true });
  headings.forEach((heading, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const keyed = rows.map((row) => [value(row, i), row]);
      keyed.sort((a, b) => (down ? compare(b[0], a[0]) : compare(a[0], b[0])));
      body.append(...keyed.map((pair) => pair[1]));
    });
  });
  const form = table.closest(".grid")?.querySelector(".filters");
  if (!form) continue;
  const field = (name, control) => {
    const label = document.createElement("label");
    label.append(name, control);
    form.append(label);
    return control;
  };
  const search = field("search", document.createElement("input"));
  search.type = "search";
  const selects = [];
  headings.forEach((heading, i) => {
    if (heading.dataset.filter === undefined) return;
    const values = [...new Set(rows.map((row) => row.cells[i].textContent))];
    if (values.length < 2) return;
    values.sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    const select = field(heading.textContent, document.createElement("select"));
    select.append(new Option("all", "\u0000"), ...values.map((text) => new Option(text || "(none)", text)));
    selects.push([i, select]);
  });
  const count = document.createElement("output");
  form.append(count);
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = words.length ? row.textContent.toLowerCase() : "";
      const keep =
        words.every((word) => text.includes(word)) &&
        selects.every(([i, select]) => select.value === "\u0000" || row.cells[i].textContent === select.value);
      row.hidden = !keep;
      shown += keep;
    }
    count.textContent = `${shown} of ${rows.length} rows`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  apply();
}
