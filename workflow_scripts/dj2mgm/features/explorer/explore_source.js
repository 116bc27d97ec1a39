// The source of the rows: the server, or the page itself.

/** Read the columns and the fate of a table from float64 numbers, one column after the other. */
function unpack(table, buffer) {
  const at = (place) => new Float64Array(buffer, 8 * table.rows * place, table.rows);
  const keys = Object.keys(table.columns);
  keys.forEach((key, place) => (table.columns[key].values = at(place)));
  table.fate = table.steps.length ? at(keys.length) : new Float64Array(table.rows);
}

/** Return the file name of a row's image, which may be in a tar file. */
const imageName = ({ image }) => image.split("/").pop();

class Served {
  constructor(base) {
    this.base = `../${encodeURIComponent(base)}`; // the page is in explorer/, next to the folder of its rows
  }

  async load(table) {
    const answer = await this._get(table, "numbers");
    unpack(table, await answer.arrayBuffer());
  }

  async texts(table, rows) {
    return rows.length ? (await this._get(table, `rows?at=${rows.join(",")}`)).json() : [];
  }

  /** Return a byte per row: 1 if the text, the id or the image's name contains the words. */
  async find(table, words) {
    const answer = await this._get(table, `find?words=${encodeURIComponent(words)}`);
    return new Uint8Array(await answer.arrayBuffer());
  }

  /** Return the addresses of a row's image, the best first. */
  images({ table, row }, side) {
    return [`${this.base}/${table.name}/image?at=${row}&side=${side}`];
  }

  /** Return an empty string: the server answers with a drawing of the problem. */
  problem() {
    return "";
  }

  async _get(table, what) {
    const answer = await fetch(`${this.base}/${table.name}/${what}`);
    if (!answer.ok) throw new Error(`The server answered ${answer.status}. Check that explore.py is still running.`);
    return answer;
  }
}

class Embedded {
  constructor() {
    this.kept = {};
  }

  async load(table) {
    unpack(table, await unzip(`${table.name}-numbers`));
    this.kept[table.name] = JSON.parse(new TextDecoder().decode(await unzip(`${table.name}-texts`)));
  }

  async texts(table, rows) {
    return Array.from(rows, (row) => this.kept[table.name].rows[row]);
  }

  async find(table, words) {
    const wanted = words.toLowerCase();
    const holds = (row) => [row.id, imageName(row), ...row.lines.map(([, text]) => text)].some((text) => text.toLowerCase().includes(wanted));
    return Uint8Array.from(this.kept[table.name].rows, holds);
  }

  /** Return the thumbnail in the page and the image's file, which is there if the page is on the machine of its run. */
  images({ table, row, image }, side) {
    if (this.problem({ table, row })) return [];
    const addresses = [this.kept[table.name].images[row], fileAddress(table.folders, image)];
    return side > SIDES[0] ? addresses.reverse() : addresses;
  }

  /** Return a word on an image that could not be read. */
  problem({ table, row }) {
    const thumbnail = this.kept[table.name].images[row] ?? "data:";
    return thumbnail.startsWith("data:") ? "" : thumbnail;
  }
}

/** Return the relative address of an image's file; `folders` has the images' folder, or one for each source. */
function fileAddress(folders, image) {
  const parts = image.split("/");
  const folder = folders[""] ?? folders[parts.shift()];
  if (location.protocol !== "file:" || folder === undefined || parts.includes("..") || image.startsWith("/")) return "";
  return [folder, ...parts.map(encodeURIComponent)].join("/");
}

async function unzip(key) {
  const bytes = Uint8Array.from(atob(document.getElementById(`data-${key}`).textContent), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}
