// Numbers and elements as the page writes them.

/** Four digits, as the commands print. */
export function short(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  return size >= 1e-3 && size < 1e6 ? String(Number(number.toPrecision(4))) : number.toExponential(3);
}

export const percent = (share) => `${(100 * share).toFixed(1)} %`;

export const gibibytes = (bytes) => `${short(bytes / 2 ** 30)} GiB`;

/** A time: of a model in seconds, by hand in the unit of the costs. */
export function time(value, inSeconds) {
  if (!inSeconds) return short(value);
  if (value >= 1 || value === 0) return `${short(value)} s`;
  return value >= 1e-3 ? `${short(1e3 * value)} ms` : `${short(1e6 * value)} µs`;
}

/** The text form of a pass, as in a plan. */
export const passName = (kind, microbatch, chunk, slice) => `${kind}${microbatch}${chunk ? `.${chunk}` : ""}${slice ? `/${slice}` : ""}`;

export const element = (id) => document.getElementById(id);

/** A new element with properties and children. */
export function made(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** A new element of a picture, with attributes and children. */
export function svg(tag, properties, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A table with a heading row; cells that are numbers stand to the right. */
export function table(heading, rows) {
  const cell = (tag) => (text) => made(tag, { textContent: text, className: /^[-+0-9.]/.test(text) ? "number" : "" });
  return made("table", {},
    made("thead", {}, made("tr", {}, ...heading.map((text) => made("th", { textContent: text, scope: "col" })))),
    made("tbody", {}, ...rows.map((row) => made("tr", {}, ...row.map(cell("td"))))));
}

/** Offers a text as a file. */
export function save(name, text, type = "text/plain") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  made("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Copies a text, and says so on the button for a moment. */
export async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

/** Calls `act` when nothing has called for so many milliseconds. */
export function debounced(act, wait) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, wait);
  };
}

/** Sizes a canvas for the screen's pixels and returns its context in CSS pixels. */
export function prepared(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return context;
}

/** The colours of the page's theme. */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "soft", "line", "idle", "accent", "panel", "area", "full", "warn"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** Round numbers of an axis from `begin` to `end` with about so many steps. */
export function ticks(begin, end, most) {
  const least = (end - begin) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= least * (1 - 1e-9));
  const found = [];
  for (let index = Math.ceil(begin / step - 1e-9); index * step <= end + step * 1e-9; index++) found.push(Number((index * step).toPrecision(12)));
  return found;
}
