// The run over time: one panel for branches, bytes, seconds and each metric, over the same steps.
import { asNumber, bytesText, numberText, secondsText } from "./format.js";
import { drawn, element, rankColor, whenSeen } from "./dom.js";
import { statusOf, stepName } from "./details.js";

const high = 70;
const left = 8;

// Returns the panels of a run: label, value of a step, and its text.
export function panelsOf(run) {
  const has = (name) => run.steps.some((step) => step[name] !== null);
  const panels = [{ label: run.branches.length ? "branches" : "steps", value: (step) => step.branch, text: String, isLane: true }];
  panels.push({ label: "bytes", value: (step) => step.nbytes, text: bytesText });
  if (has("seconds")) panels.push({ label: "the save took", value: (step) => step.seconds, text: secondsText });
  if (has("stall_seconds")) panels.push({ label: "training waited", value: (step) => step.stall_seconds, text: secondsText });
  for (const name of run.metrics) {
    panels.push({ label: name, value: (step) => asNumber(step.metrics?.[name] ?? null), text: numberText });
  }
  return panels;
}

// Returns an SVG path through points, or of dots at them.
export function pathOf(points, isDots) {
  return points.map(([x, y], i) => `${isDots || i === 0 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}${isDots ? "h0" : ""}`).join("");
}

export class Timeline {
  constructor(run, onStep) {
    Object.assign(this, { run, onStep, cursors: [] });
    const numbers = run.steps.map((step) => step.step);
    this.least = Math.min(...numbers);
    this.span = Math.max(1, Math.max(...numbers) - this.least);
    const newest = Math.max(0, run.steps.findLastIndex((step) => step.in_run));
    this.slider = element("input", { type: "range", min: 0, max: run.steps.length - 1, value: newest, "aria-label": "Step" });
    this.slider.addEventListener("input", () => this.show(Number(this.slider.value), true));
    const panels = panelsOf(run).map((panel) => this.panel(panel));
    this.element = element("div", { class: "timeline" }, panels, this.slider);
    new ResizeObserver(() => this.resize()).observe(this.element);
  }

  panel(panel) {
    const picture = drawn("svg", { height: high + 14, role: "img" });
    const title = element("h3", {}, panel.label);
    const host = element("div", { class: "panel" }, title, picture);
    const draw = () => {
      this.cursors = this.cursors.filter((each) => each.picture !== picture);
      picture.replaceChildren();
      this.draw(panel, picture, title);
      this.show(Number(this.slider.value), false);
    };
    whenSeen(host, () => {
      host.draw = draw;
      draw();
    });
    picture.addEventListener("click", (event) => this.pick(event.clientX - picture.getBoundingClientRect().left));
    return host;
  }

  resize() {
    const wide = this.element.clientWidth;
    if (wide === this.wide) return;
    this.wide = wide;
    for (const host of this.element.children) host.draw?.();
  }

  x(step) {
    return left + ((step.step - this.least) / this.span) * ((this.wide ?? this.element.clientWidth) - 2 * left);
  }

  draw(panel, picture, title) {
    const measured = this.run.steps.filter((step) => Number.isFinite(panel.value(step)));
    const values = measured.map(panel.value);
    const [low, top] = [Math.min(...values), Math.max(...values)];
    const y = (value) => (top === low ? high / 2 : 4 + ((top - value) / (top - low)) * (high - 8));
    const range = measured.length ? `from ${panel.text(low)} to ${panel.text(top)}` : "not recorded";
    picture.setAttribute("aria-label", `${panel.label} of ${measured.length} steps, ${range}`);
    picture.append(drawn("line", { x1: 0, x2: "100%", y1: high, y2: high, class: "axis" }));
    for (const branch of new Set(measured.map((step) => step.branch))) {
      for (const inRun of [true, false]) {
        const points = measured.filter((step) => step.branch === branch && step.in_run === inRun).map((step) => [this.x(step), y(panel.value(step))]);
        const stroke = rankColor(branch);
        const aside = inRun ? "" : " aside";
        if (!panel.isLane && inRun) picture.append(drawn("path", { d: pathOf(points, false), class: `run${aside}`, stroke }));
        picture.append(drawn("path", { d: pathOf(points, true), class: `dots${aside}`, stroke }));
      }
    }
    if (panel.isLane) this.crosses(picture, y);
    const lanes = low === top ? panel.label : `${panel.label} ${range}`;
    title.textContent = panel.isLane ? `${lanes}${this.legend()}` : `${panel.label}: ${low === top ? panel.text(low) : range}`;
    const first = drawn("text", { x: left, y: high + 12 }, `step ${this.least}`);
    picture.append(first);
    const cursor = drawn("line", { y1: 0, y2: high, class: "cursor" });
    const note = drawn("text", { y: high + 12 });
    picture.append(cursor, note);
    this.cursors.push({ picture, cursor, note, first, panel });
  }

  // Crosses the steps of the run that cannot be restored, and rings those that one place only has.
  crosses(picture, y) {
    for (const step of this.run.steps) {
      const [x, at] = [this.x(step), y(step.branch)];
      const title = drawn("title", {}, `${stepName(step)}: ${statusOf(this.run, step).text}`);
      if (!step.complete && step.left === null) picture.append(drawn("path", { d: `M${x - 4} ${at - 4}l8 8m0 -8l-8 8`, class: "incomplete" }, title));
      else if (step.alone !== null) picture.append(drawn("circle", { cx: x, cy: at, r: 5, class: "alone" }, title));
    }
  }

  legend() {
    const { steps } = this.run;
    const signs = [];
    if (steps.some((step) => !step.complete && step.left === null)) signs.push("✕ cannot be restored");
    if (steps.some((step) => step.alone !== null)) signs.push("○ complete in one place only");
    return signs.length ? ` · ${signs.join(" · ")}` : "";
  }

  pick(x) {
    const distance = (step) => Math.abs(this.x(step) - x);
    const nearest = this.run.steps.reduce((best, step, i) => (distance(step) < distance(this.run.steps[best]) ? i : best), 0);
    this.show(nearest, true);
  }

  // Moves the cursors to a step, by its place in the run's list.
  show(at, isChosen) {
    const step = this.run.steps[at];
    this.slider.value = at;
    this.slider.setAttribute("aria-valuetext", stepName(step));
    const x = this.x(step);
    const isLeft = x < (this.wide ?? 600) / 2;
    for (const { cursor, note, first, panel } of this.cursors) {
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      const value = panel.value(step);
      note.textContent = `${stepName(step)}: ${panel.isLane ? statusOf(this.run, step).text : value === null ? "not recorded" : panel.text(value)}`;
      note.setAttribute("x", x);
      first.setAttribute("visibility", x < 90 ? "hidden" : "visible");
      note.setAttribute("text-anchor", isLeft ? "start" : "end");
    }
    if (isChosen) this.onStep(step);
  }
}
