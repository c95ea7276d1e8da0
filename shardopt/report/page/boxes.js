// The boxes of a tensor: decodes a layout, and draws which rank wrote which box.
import { countText } from "./format.js";
import { drawn, element, rankColor } from "./dom.js";

const mostDrawn = 4096;
const mostNumbered = 64;

function cells(cuts) {
  let boxes = [[[], []]];
  for (const points of cuts) {
    boxes = boxes.flatMap(([offsets, sizes]) =>
      points.slice(1).map((end, i) => [[...offsets, points[i]], [...sizes, end - points[i]]]));
  }
  return boxes;
}

// Returns {offsets, sizes, rank} of each box; a grid counts its cells in row-major order.
export function boxesOf(layout) {
  const boxes = layout.boxes ?? cells(layout.cuts);
  return boxes.map(([offsets, sizes], i) => ({ offsets, sizes, rank: layout.ranks[i] }));
}

// Returns the two dimensions that are cut most, of equal ones the longest, in their order.
export function drawnDims(layout, boxes) {
  const counts = layout.shape.map((_, dim) => new Set(boxes.map((box) => box.offsets[dim])).size);
  const dims = layout.shape.map((_, dim) => dim);
  dims.sort((a, b) => counts[b] - counts[a] || layout.shape[b] - layout.shape[a] || a - b);
  return dims.slice(0, 2).sort((a, b) => a - b);
}

export function boxText(box) {
  const ranges = box.offsets.map((offset, dim) => `${offset}:${offset + box.sizes[dim]}`);
  return `rank ${box.rank}: [${ranges.join(", ")}]`;
}

export function drawLayout(layout) {
  const boxes = boxesOf(layout);
  const dims = drawnDims(layout, boxes);
  const [height, width] = [1, 1, ...dims.map((dim) => layout.shape[dim])].slice(-2);
  const front = boxes.filter((box) => box.offsets.every((offset, dim) => dims.includes(dim) || offset === 0));
  const high = dims.length < 2 ? 40 : Math.min(220, Math.max(60, (300 * height) / width));
  const picture = drawn("svg", { viewBox: `0 0 300 ${high}`, role: "img", class: "picture" });
  picture.setAttribute("aria-label", `${boxes.length} boxes over shape ${layout.shape.join(" × ") || "scalar"}; a list follows`);
  for (const box of front.slice(0, mostDrawn)) {
    const [[top, rows], [left, across]] = [[0, 1], [0, 1], ...dims.map((dim) => [box.offsets[dim], box.sizes[dim]])].slice(-2);
    const [x, y] = [(300 * left) / width, (high * top) / height];
    const [w, h] = [(300 * across) / width, (high * rows) / height];
    picture.append(drawn("rect", { x, y, width: w, height: h, class: "box", fill: rankColor(box.rank) },
      drawn("title", {}, boxText(box))));
    if (front.length > mostNumbered) continue;
    picture.append(drawn("text", { x: x + w / 2, y: y + h / 2 + 4, "text-anchor": "middle" }, String(box.rank)));
  }
  const list = element("details", {}, element("summary", {}, `${countText(boxes.length)} ${boxes.length === 1 ? "box, and the rank" : "boxes, and the ranks"} that wrote ${boxes.length === 1 ? "it" : "them"}`));
  list.addEventListener("toggle", () => {
    if (list.querySelector("pre")) return;
    list.append(element("pre", {}, boxes.slice(0, mostDrawn).map(boxText).join("\n")));
    if (boxes.length > mostDrawn) list.append(element("p", {}, `and ${boxes.length - mostDrawn} more`));
  });
  return [picture, list];
}
