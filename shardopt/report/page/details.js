// What is known of one step, and of one tensor.
import { bytesText, countText, dateText, numberText, secondsText } from "./format.js";
import { element, facts } from "./dom.js";
import { drawLayout } from "./boxes.js";
import { drawHistogram, statisticsFacts } from "./histogram.js";

export function stepName(step) {
  return `step ${step.step}` + (step.branch ? ` of branch ${step.branch}` : "");
}

// Returns what a place, by its number, has of a step, and how that is coloured.
export function inPlace(run, step, number) {
  const found = step.places.find((each) => each.place === number);
  if (found === undefined) return { text: "not there", tone: "quiet" };
  if (found.complete) return { text: "complete", tone: "good" };
  return { text: found.condition, tone: step.left === null && found.condition !== "some" ? "bad" : "quiet" };
}

// Returns whether a step can be restored, and how that is coloured.
export function statusOf(run, step) {
  if (!step.complete) return step.left === null ? { text: "cannot be restored from anywhere", tone: "bad" } : { text: "not complete", tone: "quiet" };
  if (step.alone !== null) return { text: `complete only in ${run.places[step.alone].name}`, tone: "warn" };
  return { text: "complete", tone: "good" };
}

export function keptText(step) {
  return step.left ?? (step.kept === false ? "no rule keeps it" : step.why.join(", "));
}

function stepFacts(run, step) {
  return facts([
    ["saved", dateText(step.saved_at)],
    ["ranks", countText(step.world_size)],
    ["tensors", countText(step.tensors)],
    ["bytes", bytesText(step.nbytes)],
    ["bytes in other steps", step.nbytes_beside ? bytesText(step.nbytes_beside) : ""],
    ["needs files of steps", step.links.join(", ")],
    ["the save took", secondsText(step.seconds)],
    ["training waited", step.stall_seconds === null ? "" : secondsText(step.stall_seconds)],
    ...Object.entries(step.metrics ?? {}).map(([name, value]) => [name, numberText(value)]),
    ["retention", keptText(step)],
  ]);
}

function problemText({ key, found, required }) {
  return found === "no such file" ? `missing: ${key}` : `${key}: found ${found}, required ${required}`;
}

export function stepDetails(run, step) {
  const places = run.places.map((place, number) => {
    const { text, tone } = inPlace(run, step, number);
    const problems = step.places.find((each) => each.place === number)?.problems ?? [];
    return element("li", {}, `${place.name} ${place.url}: `, element("span", { class: tone }, text),
      problems.length ? element("ul", {}, problems.map((problem) => element("li", {}, problemText(problem)))) : null);
  });
  const { text, tone } = statusOf(run, step);
  return [
    element("h3", {}, `${stepName(step)}: `, element("span", { class: tone }, text)),
    element("div", { class: "columns" }, stepFacts(run, step), element("ul", {}, places)),
  ];
}

export function changeText(change) {
  if (change.kind === "equal") return "equal";
  if (change.kind === "shape") return `${change.a} → ${change.b}`;
  if (change.kind === "bits") return "equal values, other bits";
  const dtype = change.kind === "dtype" ? `${change.a} → ${change.b}, ` : "";
  const share = `by ${numberText(change.relative)} × its old norm`;
  return `${dtype}${share}, an element by at most ${numberText(change.maximum)}, ${countText(change.differing)} of ${countText(change.elements)} elements`;
}

export function tensorDetails(checkpoint, tensor, change) {
  const layout = checkpoint.layouts[tensor.layout];
  const parts = [
    facts([
      ["dtype", tensor.dtype],
      ["shape", layout.shape.join(" × ") || "scalar"],
      ["elements", countText(tensor.elements)],
      ["bytes", `${countText(tensor.bytes)} (${bytesText(tensor.bytes)})`],
      ["tied to", tensor.tied_to ?? ""],
      ["changed", change ? changeText(change) : ""],
    ]),
    element("div", {}, element("h4", {}, "Layout: boxes, by the ranks that wrote them"), ...drawLayout(layout)),
  ];
  if (tensor.statistics) {
    parts.push(statisticsFacts(tensor.statistics));
    if (tensor.statistics.counts.length) parts.push(element("div", {}, element("h4", {}, "Elements"), drawHistogram(tensor.statistics)));
  }
  return [element("h3", {}, tensor.key), element("div", { class: "columns" }, parts)];
}
