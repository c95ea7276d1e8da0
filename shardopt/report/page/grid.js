// A table of any length: only the rows in view are elements. It scrolls, sorts, and is walked by keys.
import { element, identifier } from "./dom.js";

const rowHeight = 30;

function compared(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1; // what is not known comes last in both directions
  if (b === null || b === undefined) return -1;
  if (typeof a === "number" && typeof b === "number") {
    if (Number.isNaN(a)) return Number.isNaN(b) ? 0 : -1; // NaN counts as the greatest: it is what is looked for
    return Number.isNaN(b) ? 1 : b - a;
  }
  return String(b).localeCompare(String(a), "en", { numeric: true });
}

// The order of rows by a column; `falling` has the greatest first.
export function sorted(rows, value, falling) {
  const pairs = rows.map((row, at) => [value(row), at, row]);
  const known = (each) => each !== null && each !== undefined;
  pairs.sort(([a, i], [b, j]) => {
    const order = compared(a, b);
    return (falling || !known(a) || !known(b) ? order : -order) || i - j;
  });
  return pairs.map(([, , row]) => row);
}

const longestTail = 28;

// The end of a key that stays in view when its middle is cut: from a layer's number on, if there is one near.
function tailOf(key) {
  const near = Math.max(0, key.length - longestTail);
  const number = key.slice(near).search(/\.\d+\./);
  return number < 0 ? key.slice(Math.max(near, Math.floor(key.length / 2))) : key.slice(near + number);
}

/* Columns: {label, hint, width, text(row), value(row) to sort by, isNumber, isKey, tone(row)}. Rows are given in the
   order of the first one, if it has a value; `tone` is a class of a cell. A tree gives `treeOf(row)`, which
   returns {level, open} where `open` is null for a leaf, and `onToggle(row, open)`. */
export class Grid {
  constructor({ label, columns, onOpen, treeOf = null, onToggle = null }) {
    Object.assign(this, { columns, onOpen, treeOf, onToggle });
    this.id = identifier("grid");
    this.rows = this.unsorted = [];
    this.active = -1;
    this.pool = [];
    this.template = columns.map((column) => column.width).join(" ");
    this.head = element("div", { role: "row", class: "head", "aria-rowindex": 1 }, columns.map((column) => this.header(column)));
    this.head.style.gridTemplateColumns = this.template;
    this.least = `${columns.reduce((sum, column) => sum + Number(column.width.match(/\d+/)[0]), 0)}px`;
    this.head.style.minWidth = this.least; // of all rows alike, or their columns would not be in line
    if (columns[0].value) this.head.firstChild.setAttribute("aria-sort", "ascending");
    this.body = element("div", { role: "rowgroup", class: "body" });
    this.element = element(
      "div",
      { role: treeOf ? "treegrid" : "grid", class: "grid", tabindex: 0, "aria-label": label, "aria-colcount": columns.length },
      element("div", { role: "rowgroup", class: "head" }, this.head),
      this.body,
    );
    this.element.addEventListener("scroll", () => this.later(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.later()).observe(this.element);
  }

  header(column) {
    const style = column.isNumber ? "number" : null;
    if (!column.value) return element("div", { role: "columnheader", class: style }, column.label);
    const button = element("button", { type: "button", title: `${column.hint ?? column.label}: click to sort` }, column.label);
    const cell = element("div", { role: "columnheader", class: style, "aria-sort": "none" }, button);
    button.addEventListener("click", () => this.sort(column, cell));
    return cell;
  }

  sort(column, cell) {
    const falling = cell.getAttribute("aria-sort") !== "descending";
    for (const each of this.head.children) if (each.hasAttribute("aria-sort")) each.setAttribute("aria-sort", "none");
    cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
    this.order = (rows) => sorted(rows, column.value, falling);
    this.setRows(this.unsorted);
    this.element.scrollTop = 0;
  }

  setRows(rows) {
    const row = this.rows[this.active];
    this.unsorted = rows;
    this.rows = this.order ? this.order(rows) : rows;
    this.active = row === undefined ? -1 : this.rows.indexOf(row);
    this.element.setAttribute("aria-rowcount", rows.length + 1);
    this.body.style.height = `${rows.length * rowHeight}px`;
    for (const each of this.pool) each.row = undefined;
    this.render();
  }

  later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.render();
    });
  }

  render() {
    const high = this.element.clientHeight || 600;
    const first = Math.max(0, Math.floor(this.element.scrollTop / rowHeight) - 4);
    const end = Math.min(this.rows.length, Math.ceil((this.element.scrollTop + high) / rowHeight) + 4);
    const needed = Math.ceil(high / rowHeight) + 10;
    while (this.pool.length < needed) this.pool.push(this.slot());
    const taken = new Set();
    for (let at = first; at < end; at += 1) {
      const slot = this.pool[at % this.pool.length];
      taken.add(slot);
      this.fill(slot, at);
    }
    for (const slot of this.pool) slot.node.style.display = taken.has(slot) ? "grid" : "none";
    const isDrawn = this.active >= first && this.active < end;
    if (isDrawn) this.element.setAttribute("aria-activedescendant", `${this.id}-${this.active}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  slot() {
    const cells = this.columns.map((column) => element("div", { role: "gridcell", class: column.isKey ? "key" : column.isNumber ? "number" : null }));
    const node = element("div", { role: "row" }, cells);
    node.style.gridTemplateColumns = this.template;
    node.style.minWidth = this.least;
    const slot = { node, cells, row: undefined, at: -1 };
    node.addEventListener("click", () => this.open(slot.at, true));
    this.body.append(node);
    return slot;
  }

  fill(slot, at) {
    const row = this.rows[at];
    slot.node.setAttribute("aria-selected", at === this.active);
    const tree = this.treeOf?.(row);
    if (slot.row === row && slot.at === at && slot.isOpen === tree?.open) return;
    Object.assign(slot, { row, at, isOpen: tree?.open });
    slot.node.id = `${this.id}-${at}`;
    slot.node.setAttribute("aria-rowindex", at + 2);
    slot.node.style.transform = `translateY(${at * rowHeight}px)`;
    this.columns.forEach((column, i) => {
      const [cell, text] = [slot.cells[i], column.text(row)];
      const tail = column.isKey ? tailOf(text) : "";
      if (column.isKey) cell.replaceChildren(element("span", {}, text.slice(0, text.length - tail.length)), element("span", {}, tail));
      else cell.textContent = text;
      cell.title = text;
      if (column.tone) cell.className = `${column.isNumber ? "number " : ""}${column.tone(row) ?? ""}`;
    });
    if (!tree) return;
    slot.node.setAttribute("aria-level", tree.level + 1);
    if (tree.open === null) slot.node.removeAttribute("aria-expanded");
    else slot.node.setAttribute("aria-expanded", tree.open);
    slot.cells[0].style.paddingLeft = `${8 + 14 * tree.level}px`;
    slot.cells[0].textContent = `${tree.open === null ? "  " : tree.open ? "▾ " : "▸ "}${slot.cells[0].textContent}`;
  }

  // Makes a row the active one, and brings it into view.
  activate(at) {
    if (!this.rows.length) return;
    this.active = Math.max(0, Math.min(this.rows.length - 1, at));
    const top = this.active * rowHeight;
    const high = this.element.clientHeight - 2 * rowHeight;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    if (top > this.element.scrollTop + high) this.element.scrollTop = top - high;
    this.render();
  }

  // Makes a row the active one, in the middle of the table.
  center(at) {
    this.element.scrollTop = Math.max(0, at * rowHeight - this.element.clientHeight / 2 + 1.5 * rowHeight);
    this.activate(at);
  }

  open(at, isClick = false) {
    this.activate(at);
    const row = this.rows[this.active];
    const tree = this.treeOf?.(row);
    if (tree && tree.open !== null && (isClick || !this.onOpen)) this.onToggle(row, !tree.open);
    this.onOpen?.(row);
  }

  key(event) {
    if (event.target !== this.element) return;
    const page = Math.max(1, Math.floor(this.element.clientHeight / rowHeight) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const row = this.rows[this.active];
    const tree = row === undefined ? null : this.treeOf?.(row);
    if (event.key in moves) this.activate(this.active + moves[event.key]);
    else if ((event.key === "Enter" || event.key === " ") && row !== undefined) this.open(this.active, true);
    else if (event.key === "ArrowRight" && tree?.open === false) this.onToggle(row, true);
    else if (event.key === "ArrowLeft" && tree?.open) this.onToggle(row, false);
    else return;
    event.preventDefault();
  }
}
