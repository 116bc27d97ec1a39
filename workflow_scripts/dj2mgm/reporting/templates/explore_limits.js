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

const grouped = (number) => number.toLocaleString("en").replaceAll(",", "\u202f");
const lost = (count) => (count ? `−${grouped(count)}` : "0");
const shown = (value) => (Number.isInteger(value) ? grouped(value) : Number(value.toPrecision(4)).toString());

class Limits {
  /** Call `changed` after a limit has moved, and `show` with the key of a step to show its rows. */
  constructor(form, table, changed, show) {
    this.table = table;
    this.chosen = new Map(table.steps.flatMap((step) => step.limits.map((limit) => [limit, limit.value])));
    this.counts = [];
    this.sliders = new Map();
    this.changed = changed;
    this.recipe = element("pre", { "aria-label": "Changed limits, in the format of a recipe" });
    const reset = element("button", { type: "button", onclick: () => this.reset() }, "Reset limits");
    form.replaceChildren(element("h2", {}, table.steps.length ? "Recipe" : "No recipe"), ...table.steps.map((step) => this._step(step, show)));
    if (this.sliders.size) form.append(reset, this.recipe);
  }

  reset() {
    for (const limit of this.chosen.keys()) this._set(limit, limit.value);
  }

  /** Show how many rows each step drops or rewrites now. */
  update({ counts, rewritten }) {
    this.counts.forEach(({ text, step }, index) => {
      const rewrites = step.rewritten !== null, said = rewrites ? (count) => `${grouped(count)} new` : lost;
      const count = (rewrites ? rewritten : counts)[index + 1], before = rewrites ? step.rewritten : step.dropped;
      text.textContent = said(count) + (count !== before ? ` (run: ${said(before)})` : "");
    });
    const changes = [...this.chosen].filter(([limit, value]) => value !== limit.value);
    this.recipe.textContent = changes.map(([limit, value]) => `${this._stepOf(limit).operator}:\n  ${limit.argument}: ${value === null ? "no limit" : value}`).join("\n");
  }

  _stepOf(limit) {
    return this.table.steps.find((step) => step.limits.includes(limit));
  }

  _step(step, show) {
    const text = element("span", {}, lost(step.dropped));
    this.counts.push({ text, step });
    const button = element("button", { type: "button", class: "count", "aria-label": `Rows that ${step.operator} drops`, onclick: () => show(step.key) }, text);
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
    this.chosen.set(limit, value);
    this._show(limit);
    this.changed();
  }

  _show(limit) {
    const { slider, field, stops } = this.sliders.get(limit), value = this.chosen.get(limit);
    const place = value === null ? stops.indexOf(null) : stops.findLastIndex((stop) => stop !== null && stop <= value);
    slider.value = Math.max(place, 0);
    slider.setAttribute("aria-valuetext", value === null ? "no limit" : shown(value));
    slider.closest("label")?.classList.toggle("moved", value !== limit.value);
    if (document.activeElement !== field) field.value = value === null ? "" : limit.whole || limit.scores ? value : Number(value.toPrecision(6));
  }
}

/** Make the inputs for filters and order; they set `state` and call `changed`. */
function filterForm(form, table, state, changed, find) {
  const fields = [outcomeField(table, state, changed), findField(state, find)];
  const ranges = [];
  for (const [key, column] of Object.entries(table.columns)) {
    (column.words ? fields : ranges).push(column.words ? wordField(key, column, state, changed) : rangeField(key, column, state, changed));
  }
  fields.push(sortField(table, state, changed));
  form.replaceChildren(...fields.filter(Boolean));
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

function findField(state, find) {
  const input = element("input", { type: "search", "aria-label": "text or id", value: state.search, onchange: (event) => find(event.target.value) });
  return element("label", {}, element("span", {}, "text or id"), input);
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
