// The section of a run: its facts, its timeline, and a table of its steps.
import { bytesText, countText, dateText, numberText, secondsText } from "./format.js";
import { element, facts, section } from "./dom.js";
import { Grid } from "./grid.js";
import { Timeline } from "./timeline.js";
import { keptText, placesText, stepDetails } from "./details.js";

export function columnsOf(run) {
  const has = (test) => run.steps.some(test);
  const number = (label, width, value, text) => ({ label, width, isNumber: true, value, text: (step) => text(value(step)) });
  return [
    number("step", "80px", (step) => step.step, String),
    ...(run.branches.length ? [number("branch", "70px", (step) => step.branch, String)] : []),
    { label: "saved", width: "190px", value: (step) => step.saved_at, text: (step) => dateText(step.saved_at) },
    number("took", "120px", (step) => step.seconds, secondsText),
    number("training waited", "130px", (step) => step.stall_seconds, secondsText),
    number("bytes", "110px", (step) => step.nbytes, bytesText),
    ...(has((step) => step.nbytes_beside) ? [number("beside", "90px", (step) => step.nbytes_beside, (count) => (count ? bytesText(count) : ""))] : []),
    ...(has((step) => step.links.length)
      ? [number("refers to", "100px", (step) => step.links.length, (count) => (count ? `${count} steps` : "none"))] : []),
    ...run.metrics.map((name) => number(name, "110px", (step) => step.metrics?.[name] ?? null, numberText)),
    { label: "complete", width: "90px", value: (step) => Number(step.complete), text: (step) => (step.complete ? "yes" : "nowhere") },
    { label: "places", width: "minmax(220px, 1fr)", value: (step) => placesText(run, step), text: (step) => placesText(run, step) },
    { label: "kept, or why it left", width: "minmax(200px, 1fr)", value: keptText, text: keptText },
  ];
}

function runFacts(run) {
  const complete = run.steps.filter((step) => step.complete).length;
  const total = run.steps.reduce((sum, step) => sum + (step.nbytes ?? 0), 0);
  const isWaitKnown = run.steps.some((step) => step.stall_seconds !== null);
  return facts([
    ["steps", `${countText(run.steps.length)}, of which ${countText(complete)} complete`],
    ["bytes", bytesText(total)],
    ["branches", run.branches.map((each) => `${each.number} from step ${each.from_step} of ${each.of}`).join("; ") || "none but the first"],
    ["places", element("ul", {}, run.places.map((each) => element("li", {}, `${each.kind} ${each.url}`)))],
    ["seconds of saves", run.steps.some((step) => step.seconds !== null) ? "" : "not recorded"],
    ["training waited", isWaitKnown ? "" : "not recorded by the run: give its log by --log"],
    ["could not look", run.problem ?? ""],
  ]);
}

export function runSection(run, number) {
  const kind = run.kind === "stream" ? "Stream of weights" : "Run";
  const details = element("div", { class: "details", "aria-live": "polite" }, "Choose a step: in the pictures, by the slider, or in the table.");
  const grid = new Grid({ label: `Steps of ${run.url}`, columns: columnsOf(run), onOpen: (step) => show(step, true) });
  const timeline = new Timeline(run, (step) => show(step, false));
  function show(step, fromTable) {
    details.replaceChildren(...stepDetails(run, step));
    if (fromTable) timeline.show(run.steps.indexOf(step), false);
    else grid.activate(grid.rows.indexOf(step));
  }
  const removed = run.removed.map((each) => element("li", {}, `step ${each.step}` + (each.branch ? ` of branch ${each.branch}` : "") + `: ${each.left}`));
  const gone = removed.length ? [element("h3", {}, "Saved by the log, and gone"), element("ul", {}, removed)] : [];
  const made = section(`${kind} ${run.url}`, `run-${number}`, runFacts(run), timeline.element, details, grid.element, ...gone);
  grid.setRows(run.steps);
  return {
    element: made,
    title: kind,
    show(found) {
      const step = run.steps.find((each) => each.step === found.step && each.branch === found.branch);
      if (!step) return;
      show(step, false);
      timeline.show(run.steps.indexOf(step), false);
      details.scrollIntoView({ block: "center" });
    },
  };
}
