// Writes the recipe with the chosen limits as a file for config/recipes/.

/** Write a number as YAML 1.1 reads it; 1e-7 would be a string. */
const yamlNumber = (number) => String(number).replace(/^(-?\d+)e/, "$1.0e");

/** Write a JSON value as YAML, with objects and lists in block style. A JSON string is also a YAML string. */
function yaml(value, indent) {
  if (typeof value === "number") return ` ${yamlNumber(value)}`;
  if (value === null || typeof value !== "object") return ` ${JSON.stringify(value)}`;
  const list = Array.isArray(value), entries = Object.entries(value);
  if (!entries.length) return list ? " []" : " {}";
  return entries.map(([key, part]) => `\n${" ".repeat(indent)}${list ? "-" : `${key}:`}${yaml(part, indent + 2).replace(/^\n +(?=\S)/, list ? " " : "$&")}`).join("");
}

/** Return a stage's recipe with the chosen limits. A step whose limits are all lifted is left out, because it drops nothing. */
function recipeWith(table, stage, limitValues) {
  const recipe = structuredClone(table.recipes[stage]), left = new Set();
  for (const step of table.steps.filter((one) => one.stage === stage)) {
    const moved = step.limits.filter((limit) => limitValues.get(limit) !== limit.value);
    if (moved.length && step.limits.every((limit) => limitValues.get(limit) === null)) left.add(step.number - 1);
    for (const limit of moved) {
      const value = limitValues.get(limit) ?? limit.unlimited;
      recipe.process[step.number - 1][step.operator] ??= {};
      recipe.process[step.number - 1][step.operator][limit.argument] = limit.text ? String(value) : value;
    }
  }
  recipe.process = recipe.process.filter((_, place) => !left.has(place));
  return recipe;
}

/** Return the file: the changes as comments, then the recipe. */
function recipeFile(table, stage, limitValues) {
  const changes = table.steps.filter((step) => step.stage === stage).flatMap((step) => step.limits.filter((limit) => limitValues.get(limit) !== limit.value).map((limit) => `# ${step.operator}: ${limit.argument} ${limit.value ?? "no limit"} -> ${limitValues.get(limit) ?? "no limit"}\n`));
  return `# The recipe of the stage ${stage} of ${model.name}, with limits that were chosen in the explorer:\n${changes.join("")}${yaml(recipeWith(table, stage, limitValues), 0).slice(1)}\n`;
}

/** Let the browser save a file. */
function download(name, content) {
  const address = URL.createObjectURL(new Blob([content], { type: "application/yaml" }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000); // after the browser has read it
}
