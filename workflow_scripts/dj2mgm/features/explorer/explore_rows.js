// The page: a table that draws only the rows in view, and the details of one row.

const rowHeight = () => parseInt(getComputedStyle(document.documentElement).getPropertyValue("--row")); // px
const ROW_KEYS = [13, 33, 34, 35, 36, 38, 40]; // Enter, pages, ends and arrows; Tab leaves the table
const SIDES = [160, 640]; // px, longest side of images in the table and in the details
const model = JSON.parse(document.getElementById("model").textContent);
const source = model.base ? new Served(model.base) : new Embedded();
const counts = document.getElementById("counts"), detail = document.getElementById("detail");
const wanted = new URLSearchParams(location.hash.slice(1));

// on a phone, filters and limits are above the rows, which fill the screen, and open on demand
const phone = matchMedia("(max-width: 900px)");
if (phone.matches) {
  document.getElementById("tools").open = false;
  document.querySelector("main").prepend(document.querySelector("aside"));
}

let table, state, limits, rows, outcome, grid, waiting, searches = 0;
let order = { key: null };

/** Show a table with the filters of a link. */
async function open(name, link = new URLSearchParams()) {
  table = model.tables.find((one) => one.name === name) || model.tables[0];
  if (!table.fate) {
    counts.textContent = `Reading ${grouped(table.rows)} rows …`;
    await source.load(table);
  }
  state = { outcome: link.get("drop") || link.get("outcome") || "", words: {}, ranges: {}, order: link.get("order") || "", found: null };
  const words = [...link.keys()].some((key) => key !== "table") ? {} : table.shown;
  for (const [key, column] of Object.entries(table.columns)) {
    const code = column.words ? column.words.indexOf(link.get(key) || words[key]) : -1;
    if (code >= 0) state.words[key] = code;
    if (!column.words && link.get("with") === key) state.ranges[key] = [-Number.MAX_VALUE, Number.MAX_VALUE];
  }
  order = { key: null };
  limits = new Limits(document.getElementById("limits"), table, later, (key) => show({ outcome: key }));
  document.getElementById("tables").elements.table.value = table.name;
  document.body.classList.toggle("no-recipe", !table.steps.length);
  fill();
  searchForm(document.getElementById("search"), link.get("find") || "", (words) => find(words).catch(fail));
  await find(link.get("find") || "");
}

const fail = (error) => (counts.textContent = error.message);

function fill() {
  filterForm(document.getElementById("filters"), table, state, later);
}

function show(changes) {
  Object.assign(state, changes);
  fill();
  update();
}

/** Show the rows with these words. The result of an older search is ignored if a newer one has begun. */
async function find(words) {
  const number = ++searches, found = words ? await source.find(table, words) : null;
  if (number !== searches) return;
  state.found = found;
  update();
}

/** Update once per frame, however often a slider moves. */
function later() {
  if (!waiting) waiting = requestAnimationFrame(() => {
    waiting = null;
    update();
  });
}

function update() {
  const result = cascade(table, limits.values), before = rows;
  outcome = result.outcome;
  if (order.key !== state.order) order = { key: state.order, places: sorted(table, state.order.replace(/^-/, ""), state.order.startsWith("-")) };
  rows = selectRows(table, order.places, outcome, state);
  limits.update(result);
  counts.textContent = describeCounts(result);
  if (!grid) grid = draw();
  else if (rows !== before) grid.ajax.reload(null, before.length !== rows.length);
  else refresh();
  grid.column(3).title(table.steps.length ? "outcome" : wordKeys(table).map((key) => table.columns[key].label).join(", "));
  showOrder(grid.column(4), state.order.replace(/^-/, ""));
}

/** Show the column of the statistic by which rows are sorted. */
function showOrder(column, key) {
  if (column.visible() !== Boolean(key)) column.visible(Boolean(key));
  if (key) column.title(table.columns[key].label);
}

/** Update the outcomes of the rows in view. */
function refresh() {
  grid.rows().every(function () {
    this.node()?.cells[3].replaceChildren(...outcomeCell(this.data()));
  });
  grid.trigger("draw");
}

function describeCounts({ counts, back }) {
  if (!table.steps.length) return `${grouped(rows.length)} of ${grouped(table.rows)} rows shown.`;
  const note = back ? ` The run dropped ${grouped(back)} of the kept rows, so later operators did not measure them.` : "";
  return `${grouped(counts[0])} of ${grouped(table.rows)} rows kept, ${grouped(table.rows - counts[0])} dropped; ${grouped(rows.length)} shown.${note}`;
}

function draw() {
  DataTable.ext.errMode = "throw"; // instead of a dialog
  const made = new DataTable("#rows", {
    serverSide: true,
    ajax: (request, done) => answer(request).then(done, fail),
    columns: [imageCell, nameCell, textCell, outcomeCell, valueCell].map((content) => ({
      data: null,
      defaultContent: "",
      visible: content !== valueCell || Boolean(state.order),
      createdCell: (cell, _, data) => cell.replaceChildren(...content(data)),
    })),
    scrollY: phone.matches ? "max(20rem, 100vh - 18rem)" : "max(24rem, 100vh - 14.5rem)",
    scroller: { rowHeight: rowHeight(), displayBuffer: 3, serverWait: 20 },
    keys: { columns: ":eq(1)", keys: ROW_KEYS },
    ordering: false,
    autoWidth: false,
    layout: { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null },
    language: { emptyTable: "No rows.", zeroRecords: "No rows." },
  });
  made.on("key", (_, grid, key, cell, event) => {
    if (key !== 13) return;
    event.preventDefault(); // otherwise the key press would also reach the button that gets the focus
    openDetail(grid.row(cell.index().row).data());
  });
  made.on("click", "tbody tr", (event) => openDetail(made.row(event.currentTarget).data()));
  return made;
}

/** Answer a request of the table, which loads rows as it scrolls. */
async function answer({ draw, start, length }) {
  const places = Array.from(rows.subarray(start, start + length)), from = table;
  const texts = await source.texts(from, places);
  const data = texts.map((text, index) => ({ ...text, row: places[index], table: from }));
  return { draw, recordsTotal: rows.length, recordsFiltered: rows.length, data };
}

function picture(data, side) {
  const addresses = source.images(data, SIDES[side]).filter(Boolean);
  const image = element("img", { alt: `Image ${imageName(data)}`, decoding: "async" });
  const next = () => {
    if (addresses.length) image.src = addresses.shift();
    else image.replaceWith(element("span", { class: "no-image" }, imageName(data)));
  };
  image.addEventListener("error", next);
  if (!addresses.length) return element("span", { class: "no-image" }, source.problem(data) || imageName(data));
  next();
  return image;
}

const imageCell = (data) => [picture(data, 0)];
/** Return the file name of the image, and the row's id if it says more. */
const nameCell = (data) => {
  const name = imageName(data), isSame = data.id.split("/").pop() === name.replace(/\.[^.]*$/, "");
  const parts = name.split(/(?<=[_.-])/).flatMap((part) => [part, element("wbr", {})]);
  return [element("div", { class: "name", title: name }, ...parts, isSame ? "" : element("small", {}, data.id))];
};

const textCell = (data) => [element("div", { class: "text" }, ...lines({ lines: data.lines.map(([label, text]) => [label.split(" ")[0] === "after" ? "after" : label, text]) }))];
const lines = (data) => data.lines.map(([label, text]) => element("p", {}, label ? element("small", {}, `${label} `) : "", text));

function outcomeCell(data) {
  if (!data.table.steps.length) return [wordsOf(data)];
  const step = data.table.steps[outcome[data.row] - 1];
  return [element("span", { class: step ? "bad" : "good" }, step ? `dropped: ${step.operator.replaceAll("_", " ")}` : "kept")];
}

const wordKeys = ({ columns }) => Object.keys(columns).filter((key) => columns[key].words);
const wordsOf = (data) => wordKeys(data.table).map((key) => valueOf(data, key)).join(", ");

function valueCell(data) {
  const key = state.order.replace(/^-/, "");
  return [key && data.table === table ? valueOf(data, key) : ""];
}

function valueOf({ table, row }, key) {
  const { values, words } = table.columns[key];
  return Number.isNaN(values[row]) ? "–" : words ? words[values[row]] : shown(values[row]);
}

/** Show the details of one row: image, texts, statistics and near-duplicates. */
async function openDetail(data) {
  if (!data) return;
  const facts = Object.entries(data.table.columns).map(([key, { label }]) => element("tr", {}, element("th", { scope: "row" }, label), element("td", {}, valueOf(data, key))));
  const close = element("button", { type: "button", onclick: () => detail.close() }, "Close");
  detail.replaceChildren(close, element("h2", { id: "detail-title" }, imageName(data)), element("p", { class: "soft" }, `id ${data.id}`), picture(data, 1), ...lines(data), element("p", {}, ...outcomeCell(data)), element("table", {}, ...facts), ...(await copies(data)));
  grid.keys.disable(); // until the dialog closes, because the row's cell keeps the focus
  detail.showModal();
  close.focus();
}

async function copies({ table, row }) {
  const clusters = table.columns.cluster?.values;
  if (!clusters || Number.isNaN(clusters[row])) return [];
  const members = sorted(table, "distance").filter((one) => clusters[one] === clusters[row]).slice(0, 24);
  const texts = await source.texts(table, members);
  const figures = texts.map((text, index) => element("figure", {}, picture({ ...text, table, row: members[index] }, 0), element("figcaption", {}, imageName(text))));
  return [element("h3", {}, "Near-duplicate cluster, kept row first"), element("div", { class: "copies" }, ...figures)];
}

detail.addEventListener("close", () => grid.keys.enable());
document.addEventListener("focusin", ({ target }) => target.closest(".dt-scroll, dialog") || grid?.cell.blur()); // otherwise arrow keys would move between rows, not the slider
document.getElementById("tables").addEventListener("change", (event) => open(event.target.value));
phone.addEventListener("change", () => location.reload()); // the other layout has another row height
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", () => {
  const link = new URLSearchParams(location.hash.slice(1));
  open(link.get("table"), link);
});
// for the console, tests and benchmarks
globalThis.explorer = { cascade, grid: () => grid, now: () => ({ outcome, rows, limits, table }) };
open(wanted.get("table"), wanted).catch(fail);
