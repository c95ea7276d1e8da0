// The histogram of a tensor's elements.
import { countText, numberText } from "./format.js";
import { drawn, facts } from "./dom.js";

export function drawHistogram(statistics) {
  const { counts } = statistics;
  const [low, high] = statistics.edges;
  const edge = (i) => numberText(low + ((high - low) * i) / counts.length);
  const most = Math.max(1, ...counts);
  const picture = drawn("svg", { viewBox: "0 0 300 90", role: "img", class: "picture" });
  picture.setAttribute("aria-label", `histogram of ${counts.length} bins from ${edge(0)} to ${edge(counts.length)}`);
  const wide = 300 / Math.max(1, counts.length);
  counts.forEach((count, i) => {
    const tall = count ? Math.max(1, (70 * count) / most) : 0;
    const range = `${edge(i)} … ${edge(i + 1)}: ${countText(count)}`;
    picture.append(drawn("rect", { x: i * wide, y: 70 - tall, width: Math.max(1, wide - 1), height: tall, class: "bar" },
      drawn("title", {}, range)));
  });
  picture.append(drawn("text", { x: 0, y: 86 }, edge(0)));
  picture.append(drawn("text", { x: 300, y: 86, "text-anchor": "end" }, edge(counts.length)));
  return picture;
}

export function statisticsFacts(statistics) {
  const of = statistics.magnitudes ? " of magnitudes" : "";
  return facts([
    ["norm", numberText(statistics.norm)],
    ["root mean square", numberText(statistics.rms)],
    [`min${of}`, numberText(statistics.minimum)],
    [`max${of}`, numberText(statistics.maximum)],
    [`mean${of}`, numberText(statistics.mean)],
    [`std${of}`, numberText(statistics.std)],
    ["zeros", countText(statistics.zeros)],
    ["NaN", countText(statistics.nan)],
    ["inf, -inf", `${countText(statistics.positive_infinity)}, ${countText(statistics.negative_infinity)}`],
  ]);
}
