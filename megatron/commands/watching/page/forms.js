// How values and places are written, and where the lines of an axis stand.

import { percent, short, ticks, time } from "./words.js";

/** For a form of values: the factor of the axis, and the words of a value. */
export const FORMS = {
  number: { factor: 1, tell: (value) => Math.abs(value) >= 1e4 ? whole(value) : short(value) },
  percent: { factor: 100, tell: percent },
  seconds: { factor: 1, tell: (value) => time(value, true) },
  bytes: { factor: 2 ** -30, tell: (value) => `${short(value * 2 ** -30)} GiB` },
};

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

export const whole = (value) => Math.round(value).toLocaleString("en");

/** A number of an axis, short: 1.5M. */
export const compact = (value) => value !== 0 && Math.abs(value) < 0.01 ? value.toExponential(1).replace(".0", "") : COMPACT.format(value);

export const AXES = {
  iteration: { title: "iterations", tell: (value) => `iteration ${whole(value)}` },
  tokens: { title: "tokens", tell: (value) => `${whole(value)} tokens` },
  hours: { title: "hours since the start", tell: (value) => `${duration(3600 * value)} since the start` },
};

/** A time in words, with two units at most. */
export function duration(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const at = units.findIndex(([, size]) => seconds >= size);
  if (at < 0 || at === 3) return `${Math.round(10 * Math.max(0, seconds)) / 10} s`;
  const [[name, size], [finer, part]] = units.slice(at, at + 2);
  const count = Math.floor(seconds / size), rest = Math.floor((seconds - count * size) / part);
  return rest ? `${count} ${name} ${rest} ${finer}` : `${count} ${name}`;
}

/** The numbers beside which a logarithmic axis has lines. */
export function logarithmicTicks(least, most) {
  const found = [];
  const decades = Math.log10(most / least);
  const steps = decades > 5 ? [1] : decades > 1 ? [1, 3] : [1, 1.5, 2, 3, 4, 5, 6, 8];
  for (let power = Math.floor(Math.log10(least)); power <= Math.log10(most); power++) {
    for (const step of steps) {
      const value = step * 10 ** power;
      if (value >= least && value <= most) found.push(Number(value.toPrecision(6)));
    }
  }
  return found.length > 1 ? found : ticks(least, most, 4);
}
