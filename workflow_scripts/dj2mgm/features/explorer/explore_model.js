// Finds the rows that each step drops at the chosen limits, as features/explorer/row_table.py does.

const TIE = 1e-6;

/** Round as Python's round() does: halves to the even neighbor. */
function roundHalfEven(number) {
  const floor = Math.floor(number), rest = number - floor;
  return rest === 0.5 ? floor + (floor % 2) : Math.round(number);
}

/** Convert a limit by share to a score, as data/score_limits.py does. */
function boundOfShare(argument, share, scores) {
  const rows = scores.length;
  if (!rows) return 0;
  scores.sort();
  if (argument === "upper_quantile") return scores[Math.max(0, roundHalfEven(share * rows) - 1)] + TIE;
  const below = argument === "lower_quantile" ? roundHalfEven(share * rows) : rows - roundHalfEven(share * rows);
  return scores[Math.min(below, rows - 1)] - TIE;
}

/** Return the scores of the rows that no earlier step dropped. */
function scoresOf(table, limit, outcome) {
  const scores = table.columns[limit.scores].values, judged = table.columns[limit.column].values;
  const found = new Float64Array(table.rows);
  let count = 0;
  for (let row = 0; row < table.rows; row++) {
    if (outcome[row]) continue;
    const score = Number.isNaN(scores[row]) ? judged[row] : scores[row];
    if (!Number.isNaN(score)) found[count++] = score;
  }
  return found.subarray(0, count);
}

/** Return a byte per row: 1 if the run measured all numbers of the step's limits. */
function measured(table, step) {
  const known = new Uint8Array(table.rows).fill(step.limits.length ? 1 : 0);
  for (const { column } of step.limits) {
    const { values } = table.columns[column];
    for (let row = 0; row < known.length; row++) if (Number.isNaN(values[row])) known[row] = 0;
  }
  return known;
}

/** Mark rows beyond the bound with the place of the step, unless an earlier step dropped them. */
function drop(outcome, place, known, values, { side, closed }, bound) {
  const rows = outcome.length;
  if (side === "min" && closed) for (let row = 0; row < rows; row++) { if (!outcome[row] && known[row] && values[row] < bound) outcome[row] = place; }
  else if (side === "min") for (let row = 0; row < rows; row++) { if (!outcome[row] && known[row] && values[row] <= bound) outcome[row] = place; }
  else if (closed) for (let row = 0; row < rows; row++) { if (!outcome[row] && known[row] && values[row] > bound) outcome[row] = place; }
  else for (let row = 0; row < rows; row++) { if (!outcome[row] && known[row] && values[row] >= bound) outcome[row] = place; }
}

/**
 * Apply all steps. `limitValues` maps each limit to its value, or null for no limit. Return the place of the step that drops
 * each row (from 1; 0 for kept rows), the number of rows per place, the number of captions that each step rewrites, and
 * the number of kept rows that the run dropped.
 */
function cascade(table, limitValues) {
  const { rows, fate } = table, outcome = new Uint16Array(rows), counts = new Array(table.steps.length + 1).fill(0), rewritten = [];
  table.known ||= table.steps.map((step) => measured(table, step));
  table.steps.forEach((step, index) => {
    const place = index + 1, known = table.known[index];
    const bounds = step.limits.map((limit) => {
      const value = limitValues.get(limit);
      return value === null || !limit.scores ? value : boundOfShare(limit.argument, value, scoresOf(table, limit, outcome));
    });
    const beyond = step.rewritten === null ? outcome : outcome.slice();
    step.limits.forEach((limit, at) => bounds[at] !== null && drop(beyond, place, known, table.columns[limit.column].values, limit, bounds[at]));
    if (beyond !== outcome) rewritten[place] = beyond.reduce((sum, one) => sum + (one === place), 0);
    for (let row = 0; row < rows; row++) if (!outcome[row] && !known[row] && fate[row] === place) outcome[row] = place;
  });
  let back = 0;
  for (let row = 0; row < rows; row++) {
    counts[outcome[row]]++;
    if (!outcome[row] && fate[row]) back++;
  }
  return { outcome, counts, rewritten, back };
}

/** Sort all rows by a column's values; rows without a value come last. */
function sorted(table, key, descending) {
  const order = new Uint32Array(table.rows).map((_, row) => row);
  if (!key) return order;
  const { values, words } = table.columns[key];
  const sign = descending ? -1 : 1;
  const last = words ? words.length : Infinity;
  const ranks = values.map((value) => (Number.isNaN(value) ? last : sign * value));
  return order.sort((a, b) => (ranks[a] < ranks[b] ? -1 : ranks[a] > ranks[b] ? 1 : a - b));
}

/** Return the rows that pass all filters, in the given order. */
function selectRows(table, order, outcome, filters) {
  const tests = [];
  if (filters.outcome) tests.push(outcomeTest(table, outcome, filters.outcome));
  if (filters.found) tests.push((row) => filters.found[row]);
  for (const [key, code] of Object.entries(filters.words)) tests.push((row) => table.columns[key].values[row] === code);
  for (const [key, [from, to]] of Object.entries(filters.ranges)) {
    const { values } = table.columns[key];
    tests.push((row) => values[row] >= from && values[row] <= to);
  }
  return tests.length ? order.filter((row) => tests.every((test) => test(row))) : order;
}

function outcomeTest(table, outcome, wanted) {
  const fate = table.fate;
  const tests = {
    kept: (row) => !outcome[row],
    dropped: (row) => outcome[row] > 0,
    lost: (row) => outcome[row] > 0 && !fate[row],
    back: (row) => !outcome[row] && fate[row] > 0,
  };
  const place = table.steps.findIndex((step) => step.key === wanted) + 1;
  return place ? (row) => outcome[row] === place : tests[wanted] || (() => true);
}
