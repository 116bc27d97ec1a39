// The recipe's steps with a slider for each limit, and the filters of the rows.

/** Make an element with attributes and children; strings become text, never markup. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const TYPING_MS = 200; // pause after which the typed words are searched
const grouped = (number) => number.toLocaleString("en");
const dropped = (count) => `${grouped(count)} dropped`;
const shown = (value) => (Number.isInteger(value) ? grouped(value) : Number(value.toPrecision(4)).toString());

class Limits {
  /** Call `changed` after a limit has moved, and `show` with the key of a step to show its rows. */
  constructor(form, table, changed, show) {
    this.table = table;
    this.values = new Map(table.steps.flatMap((step) => step.limits.map((limit) => [limit, limit.value])));
    this.counts = [];
    this.sliders = new Map();
    this.changed = changed;
    this.recipe = element("pre", {});
    this.saved = element("p", { class: "soft", role: "status" });
    const reset = element("button", { type: "button", onclick: () => this.reset() }, "Reset limits");
    const stages = Object.keys(table.recipes).filter((stage) => table.steps.some((step) => step.stage === stage && step.limits.length));
    this.buttons = stages.map((stage) => element("button", { type: "button", onclick: () => this._save(stage) }, stages.length > 1 ? `Save as recipe: ${stage}` : "Save as recipe"));
    form.replaceChildren(element("h2", {}, table.steps.length ? "Recipe" : "No recipe"), ...table.steps.map((step) => this._step(step, show)));
    if (this.sliders.size) form.append(reset, ...this.buttons, this.saved, this.recipe);
  }

  reset() {
    for (const limit of this.values.keys()) this._set(limit, limit.value);
  }

  /** Show how many rows each step drops or rewrites now. */
  update({ counts, rewritten }) {
    this.counts.forEach(({ text, step }, index) => {
      const rewrites = step.rewritten !== null, describe = rewrites ? (count) => `${grouped(count)} rewritten` : dropped;
      const count = (rewrites ? rewritten : counts)[index + 1], before = rewrites ? step.rewritten : step.dropped;
      text.textContent = describe(count) + (count !== before ? ` (run: ${grouped(before)})` : "");
    });
    const changes = [...this.values].filter(([limit, value]) => value !== limit.value);
    this.recipe.textContent = changes.map(([limit, value]) => `${this._stepOf(limit).operator}:\n  ${limit.argument}: ${value === null ? "no limit" : value}`).join("\n");
  }

  /** Save a stage's recipe, and show where to put its file, because a page cannot write into the project. */
  _save(stage) {
    const name = `${model.name}_${stage}`.replace(/[^\w-]+/g, "_");
    download(`${name}.yaml`, recipeFile(this.table, stage, this.values));
    const named = stage === "synthesize" ? `synthesize: {recipe: ${name}}` : `recipe: ${name}`;
    this.saved.textContent = `The browser saved ${name}.yaml. Move it to config/recipes/${name}.yaml, and name it in config/experiments/<experiment>.yaml: ${named}`;
  }

  _stepOf(limit) {
    return this.table.steps.find((step) => step.limits.includes(limit));
  }

  _step(step, show) {
    const text = element("span", {}, dropped(step.dropped));
    this.counts.push({ text, step });
    const button = element("button", { type: "button", class: "count", onclick: () => show(step.key) }, text, element("span", { class: "unseen" }, ` by ${step.operator}; show them`));
    const title = element("legend", {}, step.operator.replaceAll("_", " "));
    return element("fieldset", { "data-step": step.key }, title, button, ...step.limits.map((limit) => this._limit(step, limit)));
  }

  /** Make a slider that stops at values of rows; its last stop on the open side means no limit. */
  _limit(step, limit) {
    const stops = limit.scores ? limit.stops : limit.side === "min" ? [null, ...limit.stops] : [...limit.stops, null];
    const name = `${step.operator} ${limit.argument}`;
    const slider = element("input", { type: "range", min: 0, max: stops.length - 1, step: 1, "aria-label": name });
    const field = element("input", { type: "number", step: "any", "aria-label": `${name}, as a number`, placeholder: "no limit" });
    slider.addEventListener("input", () => this._set(limit, stops[slider.valueAsNumber]));
    field.addEventListener("change", () => this._set(limit, field.value === "" && !limit.scores ? null : Number(field.value)));
    this.sliders.set(limit, { slider, field, stops });
    this._show(limit);
    return element("label", { class: "limit" }, element("span", {}, limit.argument), slider, field);
  }

  _set(limit, value) {
    this.values.set(limit, value);
    this.saved.textContent = ""; // the file has other limits now
    this._show(limit);
    this.changed();
  }

  _show(limit) {
    const { slider, field, stops } = this.sliders.get(limit), value = this.values.get(limit);
    const place = value === null ? stops.indexOf(null) : stops.findLastIndex((stop) => stop !== null && stop <= value);
    slider.value = Math.max(place, 0);
    slider.setAttribute("aria-valuetext", value === null ? "no limit" : shown(value));
    slider.closest("label")?.classList.toggle("moved", value !== limit.value);
    if (document.activeElement !== field) field.value = value === null ? "" : limit.whole || limit.scores ? value : Number(value.toPrecision(6));
  }
}

/** Make the inputs for filters and order; they set `state` and call `changed`. */
function filterForm(form, table, state, changed) {
  const fields = [outcomeField(table, state, changed)];
  const ranges = [];
  for (const [key, column] of Object.entries(table.columns)) {
    (column.words ? fields : ranges).push(column.words ? wordField(key, column, state, changed) : rangeField(key, column, state, changed));
  }
  fields.push(sortField(table, state, changed));
  form.replaceChildren(element("h2", {}, "Filters"), ...fields.filter(Boolean));
  if (ranges.length) form.append(element("details", {}, element("summary", {}, "Filter by range of a statistic"), ...ranges));
}

function choice(label, options, value, change) {
  const select = element("select", { "aria-label": label, onchange: (event) => change(event.target.value) }, ...options.map(([key, text]) => element("option", { value: key, selected: key === value }, text)));
  return element("label", {}, element("span", {}, label), select);
}

function outcomeField(table, state, changed) {
  if (!table.steps.length) return null;
  const options = [["", "all rows"], ["kept", "kept rows"], ["dropped", "dropped rows"], ["lost", "newly dropped rows"], ["back", "newly kept rows"]];
  options.push(...table.steps.map((step) => [step.key, `dropped by ${step.operator}`]));
  return choice("outcome", options, state.outcome, (value) => changed((state.outcome = value)));
}

function wordField(key, column, state, changed) {
  const change = (value) => {
    if (value === "") delete state.words[key];
    else state.words[key] = Number(value);
    changed();
  };
  const options = [["", "any"], ...column.words.map((word, code) => [String(code), word])];
  return choice(column.label, options, key in state.words ? String(state.words[key]) : "", change);
}

function sortField(table, state, changed) {
  const options = [["", "original order"]];
  for (const [key, { label, words }] of Object.entries(table.columns)) {
    options.push([key, `${label}, ${words ? "A to Z" : "lowest first"}`]);
    if (!words) options.push([`-${key}`, `${label}, highest first`]);
  }
  return choice("order", options, state.order, (value) => changed((state.order = value)));
}

/** Make the field that searches while the user types. */
function searchForm(form, words, find) {
  let timer;
  const later = (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => find(event.target.value), TYPING_MS);
  };
  form.replaceChildren(element("label", {}, element("span", {}, "search text, name or id"), element("input", { type: "search", value: words, oninput: later })));
}

function rangeField(key, column, state, changed) {
  const ends = ["from", "to"].map((end, place) => {
    const change = (event) => {
      const range = state.ranges[key] || [-Infinity, Infinity];
      range[place] = event.target.value === "" ? (place ? Infinity : -Infinity) : Number(event.target.value);
      if (range.every((one) => !Number.isFinite(one))) delete state.ranges[key];
      else state.ranges[key] = range;
      changed();
    };
    return element("input", { type: "number", step: "any", placeholder: end, "aria-label": `${column.label} ${end}`, onchange: change });
  });
  return element("div", { class: "range" }, element("span", {}, column.label), ...ends);
}
