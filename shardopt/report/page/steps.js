// The section of a run: its facts, its timeline, and a table of its steps.
import { bytesText, countText, dateText, numberText, secondsText } from "./format.js";
import { detailsPanel, element, facts, fillPanel, section } from "./dom.js";
import { Grid } from "./grid.js";
import { Timeline } from "./timeline.js";
import { inPlace, keptText, statusOf, stepDetails } from "./details.js";

export function columnsOf(run) {
  const has = (test) => run.steps.some(test);
  const number = (label, width, value, text) => ({ label, width, isNumber: true, value, text: (step) => text(value(step)) });
  return [
    { ...number("step", "90px", (step) => step.step, String), tone: (step) => (run.places.length > 1 || !step.complete ? statusOf(run, step).tone : null) },
    ...(run.branches.length ? [number("branch", "85px", (step) => step.branch, String)] : []),
    ...run.places.map((place, at) => ({
      label: place.name, width: "125px", value: (step) => inPlace(run, step, at).text,
      text: (step) => inPlace(run, step, at).text, tone: (step) => inPlace(run, step, at).tone,
    })),
    { label: "saved", width: "190px", value: (step) => step.saved_at, text: (step) => dateText(step.saved_at) },
    ...(has((step) => step.seconds !== null) ? [number("took", "110px", (step) => step.seconds, secondsText)] : []),
    ...(has((step) => step.stall_seconds !== null) ? [number("training waited", "150px", (step) => step.stall_seconds, secondsText)] : []),
    number("bytes", "110px", (step) => step.nbytes, bytesText),
    ...(has((step) => step.nbytes_beside) ? [number("in other steps", "140px", (step) => step.nbytes_beside, (count) => (count ? bytesText(count) : ""))] : []),
    ...(has((step) => step.links.length)
      ? [number("needs", "100px", (step) => step.links.length, (count) => (count ? `${count} steps` : "none"))] : []),
    ...run.metrics.map((name) => number(name, "110px", (step) => step.metrics?.[name] ?? null, numberText)),
    { label: "retention", width: "minmax(120px, 1fr)", value: keptText, text: keptText },
  ];
}

function runFacts(run) {
  const all = run.steps.length;
  const count = (test) => countText(run.steps.filter(test).length);
  const places = run.places.map(({ name, url }, at) => element("li", {},
    `${name} ${url}: ${count((step) => step.places.some((each) => each.place === at && each.complete))} of ${countText(all)} steps complete`));
  const alone = run.places.length > 1 ? `; ${count((step) => step.alone !== null)} from one place only` : "";
  const total = run.steps.reduce((sum, step) => sum + (step.nbytes ?? 0), 0);
  const isWaitKnown = run.steps.some((step) => step.stall_seconds !== null);
  return facts([
    ["steps", `${count((step) => step.complete)} of ${countText(all)} can be restored${alone}`],
    ["bytes", bytesText(total)],
    ["branches", run.branches.map((each) => `${each.number}, from step ${each.from_step} of branch ${each.of}`).join("; ") || "none but the first"],
    ["places", element("ul", {}, places)],
    ["complete", "has its manifest, and all files that it names. Contents were not compared: shardopt verify does that"],
    ["seconds of saves", run.steps.some((step) => step.seconds !== null) ? "" : "not recorded"],
    ["training waited", isWaitKnown ? "" : "not recorded by the run: give its log by --log"],
    ["could not look", run.problem ?? ""],
  ]);
}

export function runSection(run, number) {
  const kind = run.kind === "stream" ? "Stream of weights" : "Run";
  const newest = run.steps[Math.max(0, run.steps.findLastIndex((step) => step.in_run))];
  const details = detailsPanel("Chosen step", newest ? stepDetails(run, newest) : "no steps");
  const grid = new Grid({ label: `Steps of ${run.url}`, columns: columnsOf(run), onOpen: (step) => show(step, true) });
  const timeline = run.steps.length ? new Timeline(run, (step) => show(step, false)) : null;
  function show(step, fromTable) {
    const parts = stepDetails(run, step);
    if (fromTable) {
      fillPanel(details, parts);
      timeline.show(run.steps.indexOf(step), false);
      return;
    }
    details.replaceChildren(...parts);
    grid.center(grid.rows.indexOf(step));
  }
  const removed = run.removed.map((each) => element("li", {}, `step ${each.step}` + (each.branch ? ` of branch ${each.branch}` : "") + `: ${each.left}`));
  const gone = removed.length ? [element("h3", {}, "Saved by the log, and gone"), element("ul", {}, removed)] : [];
  const made = section(`${kind} ${run.url}`, `run-${number}`, runFacts(run), timeline && timeline.element, details, grid.element, ...gone);
  grid.setRows(run.steps);
  return {
    element: made,
    title: kind,
    show(found) {
      const step = run.steps.find((each) => each.step === found.step && each.branch === found.branch);
      if (!step) return;
      show(step, false);
      timeline.show(run.steps.indexOf(step), false);
      details.scrollIntoView({ block: "start" });
      details.focus({ preventScroll: true });
    },
  };
}
