// The section of a checkpoint: its facts, its tree with sums, and a table of its tensors.
import { asNumber, bytesText, countText, dateText, numberText, secondsText } from "./format.js";
import { detailsPanel, element, facts, fillPanel, section } from "./dom.js";
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
  const statistic = (label, name, hint) => ({
    label, hint, width: "98px", isNumber: true,
    value: (each) => asNumber(each.statistics?.[name] ?? null), text: (each) => numberText(each.statistics?.[name]),
  });
  const infinite = (each) => (each.statistics ? each.statistics.positive_infinity + each.statistics.negative_infinity : null);
  const change = (label, width, name, hint) => ({
    label, hint, width, isNumber: true,
    value: (each) => asNumber(changes.get(each.key)?.[name] ?? null), text: (each) => numberText(changes.get(each.key)?.[name]),
  });
  return [
    { label: "key", width: "minmax(200px, 3fr)", isKey: true, value: (each) => each.key, text: (each) => each.key },
    { label: "dtype", width: "80px", value: (each) => each.dtype, text: (each) => each.dtype },
    { label: "shape", width: "110px", text: (each) => checkpoint.layouts[each.layout].shape.join(" × ") },
    { label: "bytes", width: "80px", isNumber: true, value: (each) => each.bytes, text: (each) => bytesText(each.bytes) },
    ...(checkpoint.has_statistics ? [
      statistic("rms", "rms", "root mean square"), statistic("norm", "norm"), statistic("max", "maximum"),
      { ...statistic("NaN", "nan"), width: "65px", tone: (each) => (each.statistics?.nan ? "bad" : null) },
      { label: "inf", hint: "inf and -inf", width: "55px", isNumber: true, value: infinite, text: (each) => numberText(infinite(each)), tone: (each) => (infinite(each) ? "bad" : null) },
    ] : []),
    ...(changes.size ? [
      change("change ÷ norm", "130px", "relative", "norm of the change, divided by the old norm"),
      change("max change", "124px", "maximum", "largest change of an element"),
    ] : []),
  ];
}

function notFiniteText(checkpoint) {
  if (!checkpoint.has_statistics) return "";
  const { nan, positive_infinity: inf, negative_infinity: minus, tensors } = checkpoint.not_finite;
  return `${countText(nan)} NaN, ${countText(inf)} inf, ${countText(minus)} -inf${tensors ? ` in ${countText(tensors)} ${tensors === 1 ? "tensor" : "tensors"}` : ""}: all elements were read`;
}

// `step` is the name of the checkpoint's step, if it is one of a run.
export function checkpointSection(checkpoint, against, step) {
  const changes = new Map((against?.tensors ?? []).map((each) => [each.key, each]));
  const ofTree = detailsPanel("Tensor chosen in the tree", "Choose a tensor in the tree.");
  const ofTable = detailsPanel("Tensor chosen in the table", "Choose a tensor in the table.");
  const showIn = (panel) => (tensor) => fillPanel(panel, tensorDetails(checkpoint, tensor, changes.get(tensor.key)));
  const keys = tree(checkpoint, showIn(ofTree));
  const grid = new Grid({ label: "Tensors", columns: tensorColumns(checkpoint, changes), onOpen: showIn(ofTable) });
  const filter = element("input", { type: "search", placeholder: "part of a key", "aria-label": "Filter tensors by a part of their keys" });
  const count = element("span", { class: "quiet", role: "status" });
  const fill = () => {
    const rows = checkpoint.tensors.filter((each) => each.key.includes(filter.value));
    grid.setRows(rows);
    count.textContent = `${countText(rows.length)} of ${countText(checkpoint.tensors.length)} tensors`;
  };
  filter.addEventListener("input", fill);
  const title = step ? `Checkpoint: ${step}` : `Checkpoint ${checkpoint.url}`;
  const made = section(title, "checkpoint",
    step ? element("p", { class: "quiet" }, `A report has the tensors of one step. These are of ${step}, whichever is chosen above.`) : null,
    facts([
      ["place", step ? checkpoint.url : ""],
      ["saved", `${dateText(checkpoint.saved_at)} (save ${checkpoint.save_id})`],
      ["took", secondsText(checkpoint.seconds)],
      ["ranks", countText(checkpoint.world_size)],
      ["files", `${countText(checkpoint.files)}, ${bytesText(checkpoint.file_bytes)}`],
      ["tensors", `${countText(checkpoint.tensor_count)}, ${countText(checkpoint.elements)} elements, ${bytesText(checkpoint.bytes)}`],
      ["not finite", notFiniteText(checkpoint)],
    ]),
    element("h3", {}, "Tree"), keys.element, ofTree,
    element("h3", {}, "Tensors"), element("div", { class: "tools" }, filter, count), grid.element, ofTable);
  fill();
  return {
    element: made,
    title: step ? title : "Checkpoint",
    show(found) {
      const tensor = checkpoint.tensors.find((each) => each.key === found.tensor);
      if (!tensor) return;
      filter.value = "";
      fill();
      grid.center(grid.rows.indexOf(tensor));
      grid.element.scrollIntoView({ block: "start" });
      showIn(ofTable)(tensor);
      ofTable.focus({ preventScroll: true });
    },
  };
}
