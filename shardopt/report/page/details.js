// What is known of one step, and of one tensor.
import { bytesText, countText, dateText, numberText, secondsText } from "./format.js";
import { element, facts } from "./dom.js";
import { drawLayout } from "./boxes.js";
import { drawHistogram, statisticsFacts } from "./histogram.js";

export function stepName(step) {
  return `step ${step.step}` + (step.branch ? ` of branch ${step.branch}` : "");
}

export function placesText(run, step) {
  return step.places.map((each) => `${run.places[each.place].kind} ${each.condition}`).join(", ");
}

export function keptText(step) {
  return step.left ?? (step.kept === false ? "no rule keeps it" : step.why.join(", "));
}

function stepFacts(run, step) {
  return facts([
    ["saved", dateText(step.saved_at)],
    ["ranks", countText(step.world_size)],
    ["tensors", countText(step.tensors)],
    ["bytes of its own", bytesText(step.nbytes)],
    ["bytes beside it", step.nbytes_beside ? bytesText(step.nbytes_beside) : ""],
    ["refers to steps", step.links.join(", ")],
    ["seconds of the save", secondsText(step.seconds)],
    ["training waited", secondsText(step.stall_seconds)],
    ...Object.entries(step.metrics ?? {}).map(([name, value]) => [name, numberText(value)]),
    ["in the run", keptText(step)],
  ]);
}

export function stepDetails(run, step) {
  const places = step.places.map((each) => {
    const isComplete = ["whole", "committed", "all"].includes(each.condition);
    const place = run.places[each.place];
    const problems = each.problems.map((problem) => element("li", {}, `${problem.key}: found ${problem.found}, required ${problem.required}`));
    return element("li", {}, `${place.kind} ${place.url}: `, element("span", { class: isComplete ? "good" : "bad" }, each.condition),
      problems.length ? element("ul", {}, problems) : null);
  });
  const none = element("li", { class: "bad" }, "no place");
  return [
    element("h3", {}, stepName(step)),
    stepFacts(run, step),
    element("p", { class: step.complete ? "good" : "bad" }, step.complete ? "complete in at least one place" : "complete nowhere"),
    element("ul", {}, places.length ? places : none),
  ];
}

export function changeText(change) {
  if (change.kind === "equal") return "equal";
  if (change.kind === "shape") return `${change.a} → ${change.b}`;
  if (change.kind === "bits") return "equal values, other bits";
  const dtype = change.kind === "dtype" ? `${change.a} → ${change.b}, ` : "";
  const share = `${numberText(change.relative)} of its norm`;
  return `${dtype}${share}, max ${numberText(change.maximum)}, ${countText(change.differing)} of ${countText(change.elements)} elements`;
}

export function tensorDetails(checkpoint, tensor, change) {
  const layout = checkpoint.layouts[tensor.layout];
  const parts = [
    element("h3", {}, tensor.key),
    facts([
      ["dtype", tensor.dtype],
      ["shape", layout.shape.join(" × ") || "scalar"],
      ["elements", countText(tensor.elements)],
      ["bytes", `${countText(tensor.bytes)} (${bytesText(tensor.bytes)})`],
      ["tied to", tensor.tied_to ?? ""],
      ["changed", change ? changeText(change) : ""],
    ]),
    element("h3", {}, "Layout: which rank wrote which box"),
    ...drawLayout(layout),
  ];
  if (tensor.statistics) {
    parts.push(element("h3", {}, "Elements"), statisticsFacts(tensor.statistics));
    if (tensor.statistics.counts.length) parts.push(drawHistogram(tensor.statistics));
  }
  return parts;
}
