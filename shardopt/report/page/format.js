// Formats numbers as `shardopt ls` and `shardopt show` do.

function scaled(number, units) {
  let unit = 0;
  while (number >= 999.5 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || number >= 99.95 ? number.toFixed(0) : String(Number(number.toPrecision(3)));
  return `${digits} ${units[unit]}`.trimEnd();
}

export const unknown = "not recorded";

export function bytesText(count) {
  return count === null ? unknown : scaled(count, ["B", "kB", "MB", "GB", "TB", "PB"]);
}

export function countText(count) {
  return count === null ? unknown : count.toLocaleString("en-US");
}

export function secondsText(seconds) {
  if (seconds === null) return unknown;
  if (seconds < 0.0995) return `${(Math.max(seconds, 0) * 1000).toFixed(0)} ms`;
  if (seconds < 9.95) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 100) return `${seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return seconds < 48 * 3600 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${(seconds / 86400).toFixed(0)} days`;
}

// "nan", "inf" and "-inf" are texts in the document. Integers have all their digits, as far as a number has them.
export function numberText(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number" || Number.isSafeInteger(value)) return String(value);
  return String(Number(value.toPrecision(6)));
}

export function asNumber(value) {
  if (typeof value === "string") return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? NaN;
  return value;
}

export function dateText(seconds) {
  return seconds === null ? unknown : new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") + "Z";
}
