// Makes elements. Texts of a checkpoint become text nodes and attributes only: no HTML is parsed.

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null));
  return node;
}

export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

let identifiers = 0;

export function identifier(prefix) {
  identifiers += 1;
  return `${prefix}-${identifiers}`;
}

// A section with a heading, which names it for screen readers.
export function section(title, id, ...children) {
  const heading = element("h2", { id: `${id}-title` }, title);
  return element("section", { id, "aria-labelledby": heading.id }, heading, ...children);
}

// Terms and their values; pairs without a value are left out.
export function facts(pairs) {
  const rows = pairs.filter(([, value]) => value !== null && value !== "");
  return element("dl", { class: "facts" }, rows.map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

// A place for details of what is chosen. It takes focus from findings that lead to it.
export function detailsPanel(label, ...children) {
  return element("div", { class: "details", role: "group", "aria-label": label, tabindex: -1, "aria-live": "polite" }, children);
}

// Fills such a place, and scrolls no further than until all of it is in view.
export function fillPanel(panel, children) {
  panel.replaceChildren(...children);
  panel.scrollIntoView({ block: "nearest" });
}

// Calls `draw` when an element first comes into view.
export function whenSeen(node, draw) {
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    draw();
  }, { rootMargin: "200px" });
  observer.observe(node);
}

// Twenty or a thousand ranks: hues apart by the golden angle differ between neighbours.
export function rankColor(rank) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${(rank * 137.508 + 210) % 360} 55% ${dark ? 42 : 68}%)`;
}
