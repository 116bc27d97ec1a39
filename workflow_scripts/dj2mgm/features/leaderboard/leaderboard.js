// The grid of the leaderboard: sorting, a search field for all columns, and one below each title.

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark", dark.matches); // DataTables reads this class
follow();
dark.addEventListener("change", follow);

/** Name the fields below the titles for screen readers. */
function nameFields() {
  const titles = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  for (const field of table.tHead.rows[1].querySelectorAll("input, select")) {
    const title = titles[field.closest("td, th").cellIndex];
    field.setAttribute("aria-label", field.matches("select") ? `how to filter by ${title}` : `filter by ${title}`);
  }
}

const table = document.getElementById("experiments");
if (table) {
  new DataTable(table, {
    paging: false,
    info: false,
    order: [], // the newest first, as in the page
    columnControl: [{ target: 0, content: ["order"] }, { target: 1, content: ["search"] }],
    ordering: { indicators: false, handler: true },
    language: { search: "Search: ", zeroRecords: "No experiment matches the filters." },
  });
  nameFields();
}
