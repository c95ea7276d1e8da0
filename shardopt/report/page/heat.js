// What has changed since another checkpoint: a heat map of layers by their tensors. Only the cells in view are drawn.
import { asNumber, countText, dateText, numberText } from "./format.js";
import { element, facts, section } from "./dom.js";
import { changeText } from "./details.js";

const cell = 18;
const names = 175;
const labels = 145; // the height of the columns' names, which stand upright
const leastDeep = 10; // times the median: what no layer reaches leaves the map faint

// Returns the layers, the names within them, and the change of each pair, in the order of the document.
export function tableOf(changes) {
  const layers = new Map();
  const columns = new Map();
  for (const each of changes) {
    if (!layers.has(each.layer)) layers.set(each.layer, new Map());
    const name = each.layer ? each.key.slice(each.layer.length + 1) : each.key;
    if (!columns.has(name)) columns.set(name, columns.size);
    layers.get(each.layer).set(columns.get(name), each);
  }
  return { layers: [...layers.keys()], columns: [...columns.keys()], cells: [...layers.values()] };
}

// Returns the relative change of each tensor, by its key, as times the median of its name over the layers that changed.
export function ratiosOf({ columns, cells }) {
  const ratios = new Map();
  columns.forEach((_, column) => {
    const changes = cells.map((row) => row.get(column)).filter((change) => change);
    const shares = changes.map((change) => asNumber(change.relative)).filter((share) => share > 0 && Number.isFinite(share)).sort((a, b) => a - b);
    const usual = shares.length ? (shares[(shares.length - 1) >> 1] + shares[shares.length >> 1]) / 2 : 1;
    for (const change of changes) ratios.set(change.key, change.kind === "shape" ? Infinity : asNumber(change.relative) / usual);
  });
  return ratios;
}

// Returns how strong a ratio is drawn: 0 for no change, faint up to the median, up to 1, by its logarithm.
export function strength(ratio, high) {
  if (ratio === 0) return 0;
  return Number.isFinite(ratio) ? 0.08 + 0.92 * Math.min(1, Math.max(0, Math.log(ratio) / Math.log(high))) : 1;
}

function shortened(name, most) {
  const kept = Math.floor(most / 3);
  return name.length > most ? `${name.slice(0, kept)}…${name.slice(kept + 1 - most)}` : name;
}

class HeatMap {
  constructor(changes, onOpen) {
    Object.assign(this, { onOpen, at: [0, 0], table: tableOf(changes) });
    this.ratios = ratiosOf(this.table);
    this.high = [...this.ratios.values()].filter(Number.isFinite).reduce((most, ratio) => Math.max(most, ratio), leastDeep);
    const { layers, columns } = this.table;
    this.canvas = element("canvas", {});
    this.extent = element("div", { class: "extent" });
    this.extent.style.width = `${names + columns.length * cell}px`;
    this.extent.style.height = `${labels + layers.length * cell + 8}px`;
    this.said = element("p", { role: "status" }, "Move over the map, or focus it and use the arrow keys.");
    const label = `Heat map of relative changes: ${layers.length} layers by ${columns.length} tensors. Arrow keys move, Enter opens.`;
    this.element = element("div", { class: "heat", tabindex: 0, role: "application", "aria-label": label }, this.extent, this.canvas);
    this.element.addEventListener("scroll", () => this.later(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.element.addEventListener("pointermove", (event) => this.point(event));
    this.element.addEventListener("click", (event) => {
      this.point(event);
      this.open();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.later());
    new ResizeObserver(() => this.later()).observe(this.element);
  }

  later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw();
    });
  }

  draw() {
    const { clientWidth: wide, clientHeight: high, scrollLeft, scrollTop } = this.element;
    const scale = devicePixelRatio;
    this.canvas.width = wide * scale;
    this.canvas.height = high * scale;
    this.canvas.style.width = `${wide}px`;
    this.canvas.style.height = `${high}px`;
    const style = getComputedStyle(this.element);
    const color = (name) => style.getPropertyValue(name).trim();
    const [light, deep, hue, empty, text, accent] = ["--light", "--deep", "--heat", "--empty", "--text", "--accent"].map(color);
    const brush = this.canvas.getContext("2d");
    brush.scale(scale, scale);
    brush.font = "11px system-ui, sans-serif";
    const { layers, columns, cells } = this.table;
    const last = Math.min(layers.length, Math.ceil((scrollTop + high - labels) / cell));
    for (let row = Math.floor(scrollTop / cell); row < last; row += 1) {
      const y = labels + row * cell - scrollTop;
      for (const [column, change] of cells[row]) {
        const x = names + column * cell - scrollLeft;
        if (x < names - cell || x > wide) continue;
        const share = strength(this.ratios.get(change.key), this.high);
        const lightness = parseFloat(light) + share * (parseFloat(deep) - parseFloat(light));
        brush.fillStyle = share ? `hsl(${hue} 70% ${lightness}%)` : empty;
        brush.fillRect(x, y, cell - 1, cell - 1);
        if (row === this.at[0] && column === this.at[1]) {
          brush.strokeStyle = accent;
          brush.lineWidth = 2;
          brush.strokeRect(x + 1, y + 1, cell - 3, cell - 3);
        }
      }
      brush.fillStyle = color("--page");
      brush.fillRect(0, y, names - 2, cell);
      brush.fillStyle = text;
      brush.fillText(shortened(layers[row], 28), 4, y + cell - 5);
    }
    brush.fillStyle = color("--page");
    brush.fillRect(0, 0, wide, labels - 2);
    brush.fillStyle = text;
    brush.rotate(-Math.PI / 2);
    const end = Math.min(columns.length, Math.ceil((scrollLeft + wide - names) / cell));
    for (let column = Math.floor(scrollLeft / cell); column < end; column += 1) {
      const x = names + column * cell - scrollLeft;
      if (x >= names - cell / 2) brush.fillText(shortened(columns[column], 24), 4 - labels, x + cell - 5);
    }
  }

  change() {
    return this.table.cells[this.at[0]]?.get(this.at[1]);
  }

  say() {
    const [row, column] = this.at;
    const change = this.change();
    const ratio = change ? this.ratios.get(change.key) : 0;
    const times = ratio && Number.isFinite(ratio) ? `, ${numberText(Number(ratio.toPrecision(3)))} × the median of its column` : "";
    this.said.textContent = `${this.table.layers[row]} · ${this.table.columns[column]}: ${change ? changeText(change) + times : "no such tensor"}`;
    this.later();
  }

  point(event) {
    const place = this.element.getBoundingClientRect();
    const column = Math.floor((event.clientX - place.left + this.element.scrollLeft - names) / cell);
    const row = Math.floor((event.clientY - place.top + this.element.scrollTop - labels) / cell);
    if (event.clientY - place.top < labels || event.clientX - place.left < names || column < 0 || column >= this.table.columns.length || row < 0 || row >= this.table.layers.length) return;
    if (row === this.at[0] && column === this.at[1]) return;
    this.at = [row, column];
    this.say();
  }

  key(event) {
    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ?? [0, 0];
    if (event.key === "Enter") this.open();
    else if (!down && !right) return;
    event.preventDefault();
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    this.at = [within(this.at[0] + down, this.table.layers.length), within(this.at[1] + right, this.table.columns.length)];
    this.element.scrollTop = Math.max(Math.min(this.element.scrollTop, this.at[0] * cell), labels + (this.at[0] + 2) * cell - this.element.clientHeight);
    this.element.scrollLeft = Math.max(Math.min(this.element.scrollLeft, this.at[1] * cell), names + (this.at[1] + 2) * cell - this.element.clientWidth);
    this.say();
  }

  open() {
    const change = this.change();
    if (change) this.onOpen({ tensor: change.key });
  }
}

export function changesSection(changes, onOpen) {
  const map = new HeatMap(changes.tensors, onOpen);
  const unequal = changes.tensors.filter((each) => each.kind !== "equal").length;
  const scale = element("p", { class: "quiet" }, "Relative change, divided by the median of its column: up to 1 × ",
    element("span", { class: "scale" }), ` ${numberText(Number(map.high.toPrecision(3)))} ×, logarithmic`);
  const list = (keys) => (keys.length ? `${countText(keys.length)}: ${keys.slice(0, 20).join(", ")}${keys.length > 20 ? ", …" : ""}` : "");
  const made = section("Changes", "changes",
    facts([
      ["since", `${changes.url}, saved ${dateText(changes.saved_at)} (save ${changes.save_id})`],
      ["tensors that differ", `${countText(unequal)} of ${countText(changes.tensors.length)}`],
      ["values that differ", list(changes.values)],
      ["only before", list(changes.only_before)],
      ["only now", list(changes.only_now)],
      ["not compared", list(changes.not_compared)],
      ["not read", list(changes.unread)],
      ["relative change", "2-norm of the difference, divided by that of the earlier tensor"],
    ]),
    scale, map.element, map.said);
  return { element: made, title: "Changes" };
}
