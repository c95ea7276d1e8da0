// The section of a checkpoint: its facts, its tree with sums, and a table of its tensors.
import { asNumber, bytesText, countText, dateText, numberText, secondsText } from "./format.js";
import { element, facts, section } from "./dom.js";
import { Grid } from "./grid.js";
import { tensorDetails } from "./details.js";

const opened = 40; // rows: levels are opened as long as there are no more

// Returns the rows of a tree in view: those below rows that are all open.
export function visibleRows(rows, isOpen) {
  const visible = [];
  let hidden = Infinity; // the level from which on rows are below a closed one
  for (const row of rows) {
    if (row.level >= hidden) continue;
    hidden = row.isParent && !isOpen.has(row) ? row.level + 1 : Infinity;
    visible.push(row);
  }
  return visible;
}

function treeRows(checkpoint) {
  return checkpoint.tree.map((row, i) => ({ ...row, isParent: (checkpoint.tree[i + 1]?.level ?? 0) > row.level }));
}

function firstOpen(rows) {
  const open = new Set();
  for (let level = 0; ; level += 1) {
    const parents = rows.filter((row) => row.isParent && row.level === level);
    if (!parents.length || visibleRows(rows, new Set([...open, ...parents])).length > opened) return open;
    parents.forEach((row) => open.add(row));
  }
}

function tree(checkpoint, onOpen) {
  const { tensors } = checkpoint;
  const rows = treeRows(checkpoint);
  const isOpen = firstOpen(rows);
  const of = (row, name) => row[name] ?? tensors[row.tensor]?.[name] ?? null;
  const number = (label, width, name, text) => ({ label, width, isNumber: true, text: (row) => (of(row, name) === null ? "" : text(of(row, name))) });
  const kind = (row) => row.text ?? (row.tensor === undefined ? "" : `${tensors[row.tensor].dtype} [${checkpoint.layouts[tensors[row.tensor].layout].shape.join(", ")}]`);
  const grid = new Grid({
    label: "Tree of keys",
    columns: [
      { label: "name", width: "minmax(220px, 2fr)", text: (row) => row.name },
      number("tensors", "90px", "tensors", countText),
      number("elements", "130px", "elements", countText),
      number("bytes", "90px", "bytes", bytesText),
      { label: "dtype and shape, or value", width: "minmax(220px, 2fr)", text: kind },
    ],
    treeOf: (row) => ({ level: row.level, open: row.isParent ? isOpen.has(row) : null }),
    onToggle(row, open) {
      if (open) isOpen.add(row);
      else isOpen.delete(row);
      grid.setRows(visibleRows(rows, isOpen));
    },
    onOpen: (row) => row.tensor !== undefined && onOpen(tensors[row.tensor]),
  });
  grid.setRows(visibleRows(rows, isOpen));
  return grid;
}

function tensorColumns(checkpoint, changes) {
  const statistic = (label, name) => ({
    label, width: "108px", isNumber: true,
    value: (each) => asNumber(each.statistics?.[name] ?? null), text: (each) => numberText(each.statistics?.[name]),
  });
  const change = (label, name) => ({
    label, width: "108px", isNumber: true,
    value: (each) => asNumber(changes.get(each.key)?.[name] ?? null), text: (each) => numberText(changes.get(each.key)?.[name]),
  });
  return [
    { label: "key", width: "minmax(230px, 3fr)", value: (each) => each.key, text: (each) => each.key },
    { label: "dtype", width: "90px", value: (each) => each.dtype, text: (each) => each.dtype },
    { label: "shape", width: "110px", text: (each) => checkpoint.layouts[each.layout].shape.join(" × ") },
    { label: "bytes", width: "90px", isNumber: true, value: (each) => each.bytes, text: (each) => bytesText(each.bytes) },
    ...(checkpoint.has_statistics ? [statistic("rms", "rms"), statistic("norm", "norm"), statistic("max", "maximum"), statistic("NaN", "nan")] : []),
    ...(changes.size ? [change("changed", "relative"), change("max change", "maximum")] : []),
  ];
}

export function checkpointSection(checkpoint, against) {
  const changes = new Map((against?.tensors ?? []).map((each) => [each.key, each]));
  const details = element("div", { class: "details", "aria-live": "polite" }, "Choose a tensor: in the tree or in the table.");
  const show = (tensor) => details.replaceChildren(...tensorDetails(checkpoint, tensor, changes.get(tensor.key)));
  const keys = tree(checkpoint, show);
  const grid = new Grid({ label: "Tensors", columns: tensorColumns(checkpoint, changes), onOpen: show });
  const filter = element("input", { type: "search", placeholder: "part of a key", "aria-label": "Filter tensors by a part of their keys" });
  const count = element("span", { class: "quiet", role: "status" });
  const fill = () => {
    const rows = checkpoint.tensors.filter((each) => each.key.includes(filter.value));
    grid.setRows(rows);
    count.textContent = `${countText(rows.length)} of ${countText(checkpoint.tensors.length)} tensors`;
  };
  filter.addEventListener("input", fill);
  const made = section(`Checkpoint ${checkpoint.url}`, "checkpoint",
    facts([
      ["saved", `${dateText(checkpoint.saved_at)} as ${checkpoint.save_id}`],
      ["took", secondsText(checkpoint.seconds)],
      ["ranks", countText(checkpoint.world_size)],
      ["files", `${countText(checkpoint.files)}, ${bytesText(checkpoint.file_bytes)}`],
      ["tensors", `${countText(checkpoint.tensor_count)}, ${countText(checkpoint.elements)} elements, ${bytesText(checkpoint.bytes)}`],
    ]),
    element("h3", {}, "Tree"), keys.element, details,
    element("h3", {}, "Tensors"), element("div", { class: "tools" }, filter, count), grid.element);
  fill();
  return {
    element: made,
    title: "Checkpoint",
    show(found) {
      const tensor = checkpoint.tensors.find((each) => each.key === found.tensor);
      if (!tensor) return;
      show(tensor);
      filter.value = "";
      fill();
      grid.activate(grid.rows.indexOf(tensor));
      details.scrollIntoView({ block: "start" });
    },
  };
}
