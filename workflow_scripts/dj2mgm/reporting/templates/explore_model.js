// What each step drops, at limits that a reader may move: the same as reporting/explorer/steps.py says of the recipe's.

const TIE = 1e-6;

/** Python's round(): a half goes to the even neighbor. */
function roundHalfEven(number) {
  const floor = Math.floor(number), rest = number - floor;
  return rest === 0.5 ? floor + (floor % 2) : Math.round(number);
}

/** Where a share of the scores cuts (data/shares.py). */
function boundOfShare(argument, share, scores) {
  const rows = scores.length;
  if (!rows) return 0;
  scores.sort();
  if (argument === "upper_quantile") return scores[Math.max(0, roundHalfEven(share * rows) - 1)] + TIE;
  const below = argument === "lower_quantile" ? roundHalfEven(share * rows) : rows - roundHalfEven(share * rows);
  return scores[Math.min(below, rows - 1)] - TIE;
}

/** The scores of the rows that no step has dropped so far. */
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

/**
 * Which step drops each row: its place from 1, 0 for a row that stays; and how many rows each step drops.
 * `chosen` holds a value, or null for no limit, by limit.
 */
function cascade(table, chosen) {
  const outcome = new Uint16Array(table.rows), dropped = [];
  table.steps.forEach((step, index) => {
    const place = index + 1;
    const tests = step.limits.filter((limit) => chosen.get(limit) !== null).map((limit) => ({
      values: table.columns[limit.column].values,
      low: limit.side === "min",
      closed: limit.closed,
      bound: limit.scores ? boundOfShare(limit.argument, chosen.get(limit), scoresOf(table, limit, outcome)) : chosen.get(limit),
    }));
    const judged = step.limits.map((limit) => table.columns[limit.column].values);
    let count = 0;
    for (let row = 0; row < table.rows; row++) {
      if (outcome[row]) continue;
      let drops = false, known = judged.length > 0;
      for (const values of judged) if (values[row] !== values[row]) known = false; // NaN: the run did not measure it
      if (known) {
        for (const { values, low, closed, bound } of tests) {
          const value = values[row];
          if (low ? value < bound : value > bound) drops = true;
          else if (!closed && value === bound) drops = true;
        }
      } else {
        drops = table.fate[row] === place;
      }
      if (drops) {
        outcome[row] = place;
        count++;
      }
    }
    dropped.push(count);
  });
  return { outcome, dropped };
}

/** The places of all rows, by a column's values; rows without one come last. */
function sorted(table, key, descending) {
  const order = new Uint32Array(table.rows).map((_, row) => row);
  if (!key) return order;
  const { values, words } = table.columns[key];
  const sign = descending ? -1 : 1;
  const last = words ? words.length : Infinity;
  const ranks = values.map((value) => (Number.isNaN(value) ? last : sign * value));
  return order.sort((a, b) => (ranks[a] < ranks[b] ? -1 : ranks[a] > ranks[b] ? 1 : a - b));
}

/** The rows that pass all filters, in this order. */
function chosenRows(table, order, outcome, filters) {
  const rows = new Uint32Array(table.rows);
  const ranges = Object.entries(filters.ranges).map(([key, [from, to]]) => [table.columns[key].values, from, to]);
  const words = Object.entries(filters.words).map(([key, code]) => [table.columns[key].values, code]);
  const passes = outcomeTest(table, outcome, filters.outcome);
  let count = 0;
  for (const row of order) {
    if (filters.found && !filters.found[row]) continue;
    if (!passes(row)) continue;
    if (!words.every(([values, code]) => values[row] === code)) continue;
    if (!ranges.every(([values, from, to]) => values[row] >= from && values[row] <= to)) continue;
    rows[count++] = row;
  }
  return rows.subarray(0, count);
}

function outcomeTest(table, outcome, wanted) {
  const fate = table.fate;
  const tests = {
    "": () => true,
    kept: (row) => !outcome[row],
    dropped: (row) => outcome[row] > 0,
    lost: (row) => outcome[row] > 0 && !fate[row],
    back: (row) => !outcome[row] && fate[row] > 0,
  };
  const place = table.steps.findIndex((step) => step.key === wanted) + 1;
  return place ? (row) => outcome[row] === place : tests[wanted] || tests[""];
}
