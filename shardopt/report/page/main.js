// Puts the sections into the page, and leads from findings and links to them.
import { element } from "./dom.js";
import { stepName } from "./details.js";
import { runSection } from "./steps.js";
import { checkpointSection } from "./tensors.js";
import { changesSection } from "./heat.js";

const report = JSON.parse(document.getElementById("document").textContent);
const runs = report.runs.map(runSection);
const ofRun = report.runs[0]?.steps.find((step) => step.save_id !== null && step.save_id === report.checkpoint?.save_id);
const checkpoint = report.checkpoint && checkpointSection(report.checkpoint, report.against, ofRun && stepName(ofRun));
const changes = report.against && changesSection(report.against, (found) => checkpoint.show(found));

for (const each of [...runs, checkpoint, changes].filter(Boolean)) {
  document.querySelector("main").append(each.element);
  document.querySelector("nav").append(element("a", { href: `#${each.element.id}` }, each.title));
}

for (const text of document.querySelectorAll("[data-finding]")) {
  const found = report.findings[Number(text.dataset.finding)];
  if (found.step === undefined && found.tensor === undefined) continue;
  const button = element("button", { type: "button", class: "link" }, text.textContent);
  button.addEventListener("click", () => (found.tensor === undefined ? runs[found.run] : checkpoint).show(found));
  text.replaceChildren(button);
}
