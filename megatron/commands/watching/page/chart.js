// A chart of curves: axes, a legend, the values under the pointer or the arrow keys, and zooming.

import { AXES, FORMS, compact, logarithmicTicks } from "./forms.js";
import { made, svg, ticks } from "./words.js";

const LEFT = 54, RIGHT = 14, TOP = 22, BOTTOM = 38, HEIGHT = 250;
const MOST_DOTS = 150; // points of a curve up to which each has a dot
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

export class ChartView {
  /** `on.range(from, to)` zooms (`null` shows all), `on.zoom(factor, at)` too; `on.cursor(x)` points at a place. */
  constructor(chart, on) {
    Object.assign(this, { chart, on, lines: [], at: null });
    this.plot = made("div", { className: "plot", tabIndex: 0 });
    this.plot.setAttribute("role", "application");
    this.tip = made("div", { className: "tip", hidden: true });
    this.told = made("p", { className: "visually-hidden" });
    this.told.setAttribute("aria-live", "polite");
    this.legend = made("ul", { className: "legend" });
    this.node = made("section", { className: "chart" }, made("h2", { textContent: chart.title }), this.plot, this.tip, this.legend, this.told);
    this.node.dataset.chart = chart.name;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  /** `runs` are those that are seen, each with its `colour`; `promise` is a value, or null. */
  show(chart, runs, { axis, range, log, promise }) {
    Object.assign(this, { chart, axis, range, promise, log: log && chart.logarithmic });
    this.form = FORMS[chart.form];
    this.lines = runs.flatMap((run) => linesOf(run, run.curves[chart.name] ?? [], runs.length > 1, axis));
    this.restarts = runs.flatMap((run) => run.restarts.map((restart) => ({ run, restart, x: placeOf(restart, run, axis) })));
    this.node.hidden = !this.lines.length;
    this.draw();
    this.drawLegend();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width || !this.lines.length) return;
    this.scale = this.scales(width);
    const { x, y, marks, places } = this.scale, { title } = AXES[this.axis], foot = HEIGHT - BOTTOM;
    const clip = `clip-${this.chart.name}`;
    this.over = svg("g", {});
    this.plot.replaceChildren(svg("svg", { width, height: HEIGHT, "aria-hidden": "true" },
      svg("clipPath", { id: clip }, svg("rect", { x: LEFT, y: TOP - 4, width: width - LEFT - RIGHT, height: foot - TOP + 8 })),
      ...marks.flatMap((value) => [
        svg("path", { class: "rule", d: `M${LEFT} ${y(value)}H${width - RIGHT}` }),
        written(compact(value * this.form.factor), { x: LEFT - 7, y: y(value) + 4, class: "end" })]),
      ...places.map((place) => written(compact(place), { x: x(place), y: foot + 17, class: "middle" })),
      written(this.chart.form === "percent" ? `%: ${this.chart.unit}` : `${this.chart.unit}${this.log ? ", logarithmic" : ""}`, { x: LEFT, y: 11 }),
      written(title, { x: width - RIGHT, y: HEIGHT - 5, class: "end" }),
      svg("g", { "clip-path": `url(#${clip})` }, ...this.drawn()), this.over));
    this.plot.setAttribute("aria-label", `${this.chart.title}, ${this.chart.unit}, over ${title}: ${this.lines.length} ${this.lines.length === 1 ? "curve" : "curves"}`);
    this.point(this.at);
  }

  /** Everything within the axes: restarts, the promise, edges below lines, dots above. */
  drawn() {
    const { x, y } = this.scale, foot = HEIGHT - BOTTOM;
    const restarts = this.restarts.filter((own) => own.x !== null).map((own) => {
      const line = svg("path", { class: "restart", d: `M${x(own.x)} ${TOP}V${foot}` });
      line.append(Object.assign(svg("title", {}), { textContent: `${own.run.title} went on from iteration ${own.restart.iteration}` }));
      return line;
    });
    const ordered = [...this.lines].sort((a, b) => Number(b.look === "edge") - Number(a.look === "edge"));
    const curves = ordered.map((line) => svg("path", {
      class: `curve ${line.look}`, "stroke-dasharray": line.dash, style: `stroke: ${line.colour}`,
      d: line.xs.map((place, index) => `${index ? "L" : "M"}${x(place).toFixed(1)} ${y(line.ys[index]).toFixed(1)}`).join("") }));
    const dots = this.lines.filter((line) => (line.look === "dots" || line.xs.length === 1) && line.xs.length <= MOST_DOTS).flatMap((line) =>
      line.xs.map((place, index) => svg("circle", { class: "dot", cx: x(place), cy: y(line.ys[index]), r: 3.5, style: `fill: ${line.colour}` })));
    const promised = this.promise === null ? [] : [svg("path", { class: "promise", d: `M${LEFT} ${y(this.promise)}H5000` })];
    return [...restarts, ...promised, ...curves, ...dots];
  }

  scales(width) {
    const [from, to] = this.range;
    const seen = this.lines.flatMap(({ xs, ys }) => ys.filter((_, index) => xs[index] >= from && xs[index] <= to));
    const all = seen.length ? seen : this.lines.flatMap(({ ys }) => ys);
    const values = this.promise === null ? all : [...all, this.promise];
    const isLog = this.log && values.some((value) => value > 0);
    const usable = isLog ? values.filter((value) => value > 0) : values;
    let [least, most] = usable.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    if (isLog) [least, most] = least === most ? [least / 2, most * 2] : [least / 1.05, most * 1.05];
    else {
      const room = (most - least || Math.abs(most) || 1) * (most === least ? 0.5 : 0.05);
      [least, most] = [least >= 0 ? Math.max(0, least - room) : least - room, most + room];
    }
    const foot = HEIGHT - BOTTOM, size = foot - TOP, { factor } = this.form;
    const share = isLog ? (value) => Math.log(Math.max(value, least / 1e3) / least) / Math.log(most / least) : (value) => (value - least) / (most - least);
    const marks = isLog ? logarithmicTicks(least * factor, most * factor) : ticks(least * factor, most * factor, 5);
    return {
      width, from, to,
      x: (place) => LEFT + (place - from) / (to - from) * (width - LEFT - RIGHT),
      place: (pixel) => from + (Math.min(Math.max(pixel, LEFT), width - RIGHT) - LEFT) / (width - LEFT - RIGHT) * (to - from),
      y: (value) => foot - share(value) * size,
      marks: marks.map((mark) => mark / factor), places: ticks(from, to, (width - LEFT - RIGHT) / 55),
    };
  }

  drawLegend() {
    const several = new Set(this.lines.map((line) => line.run)).size > 1;
    const kinds = new Map(this.lines.filter((line) => line.name).map((line) => [line.name, line]));
    const runs = new Map(several ? this.lines.map((line) => [line.run, line]) : []);
    const items = [
      ...[...runs].map(([name, { colour }]) => made("li", {}, sample(colour, ""), name)),
      ...[...kinds].map(([name, { colour, dash, look }]) => made("li", {}, sample(several ? "var(--soft)" : colour, dash, look), name))];
    if (this.promise !== null) items.push(made("li", {}, sample("var(--ink)", "8 4"), `promised: ${this.form.tell(this.promise)}`));
    this.legend.replaceChildren(...items);
    this.legend.hidden = !items.length;
  }

  /** Marks the points next to a place of the axis; `null` marks none. `tells`: also writes their values. */
  point(at, tells = false) {
    this.at = at;
    if (!this.over) return;
    this.over.replaceChildren();
    this.tip.hidden = true;
    if (at === null || at < this.scale.from || at > this.scale.to) return;
    const { x, y } = this.scale, foot = HEIGHT - BOTTOM;
    const found = this.lines.map((line) => ({ line, index: nearest(line.xs, at) })).filter(({ index }) => index >= 0);
    this.over.append(svg("path", { class: "cursor", d: `M${x(at)} ${TOP}V${foot}` }),
      ...found.map(({ line, index }) => svg("circle", { class: "dot", cx: x(line.xs[index]), cy: y(line.ys[index]), r: 4, style: `fill: ${line.colour}` })));
    if (tells) this.tell(at, found);
  }

  tell(at, found) {
    const rows = found.map(({ line, index }) => [line, `${line.title}: ${this.form.tell(line.ys[index])}`]);
    const place = AXES[this.axis].tell(found.length ? found[0].line.xs[found[0].index] : at);
    this.tip.replaceChildren(made("strong", { textContent: place }),
      ...rows.map(([line, text]) => made("div", {}, sample(line.colour, line.dash, line.look), text)));
    this.told.textContent = [place, ...rows.map(([, text]) => text)].join("; ");
    this.tip.hidden = false;
    const pixel = this.scale.x(at) + this.plot.offsetLeft, wide = this.tip.offsetWidth;
    this.tip.style.left = `${pixel + 14 + wide > this.node.clientWidth ? Math.max(4, pixel - 14 - wide) : pixel + 14}px`;
    this.tip.style.top = `${this.plot.offsetTop + TOP}px`;
  }

  listen() {
    let begun = null;
    const pixel = (event) => event.clientX - this.plot.getBoundingClientRect().left;
    const shown = () => this.scale && this.lines.length;
    this.plot.addEventListener("pointerdown", (event) => { if (shown() && event.button === 0) { begun = pixel(event); this.plot.setPointerCapture(event.pointerId); } });
    this.plot.addEventListener("pointermove", (event) => {
      if (!shown()) return;
      this.on.cursor(this.scale.place(pixel(event)), this);
      if (begun !== null) {
        const [left, right] = [begun, pixel(event)].map((at) => this.scale.x(this.scale.place(at))).sort((a, b) => a - b);
        this.over.append(svg("rect", { class: "selection", x: left, y: TOP, width: right - left, height: HEIGHT - BOTTOM - TOP }));
      }
    });
    this.plot.addEventListener("pointerup", (event) => {
      if (begun !== null && Math.abs(pixel(event) - begun) > 6) this.on.range(...[begun, pixel(event)].map(this.scale.place).sort((a, b) => a - b));
      begun = null;
    });
    this.plot.addEventListener("pointercancel", () => { begun = null; });
    this.plot.addEventListener("pointerleave", () => this.on.cursor(null, this));
    this.plot.addEventListener("blur", () => this.on.cursor(null, this));
    this.plot.addEventListener("dblclick", () => this.on.range(null));
    this.plot.addEventListener("keydown", (event) => { if (shown() && this.press(event.key)) event.preventDefault(); });
  }

  /** Acts on a key; returns whether the key has a meaning. */
  press(key) {
    const { xs } = this.lines[0], here = this.at === null ? -1 : nearest(xs, this.at);
    const moves = { ArrowRight: here + 1, ArrowLeft: here < 0 ? xs.length - 1 : here - 1, Home: 0, End: xs.length - 1 };
    if (key in moves) this.on.cursor(xs[Math.max(0, Math.min(xs.length - 1, moves[key]))], this);
    else if (key === "+" || key === "=") this.on.zoom(0.5, this.at);
    else if (key === "-") this.on.zoom(2, this.at);
    else if (key === "Escape") this.on.cursor(null, this);
    else return false;
    return true;
  }
}

/** The curves of a run as lines. One run has a colour for each curve; of several, each has a colour. */
function linesOf(run, curves, isOneOfSeveral, axis) {
  let solid = -1;
  return curves.map((curve) => {
    if (curve.look !== "edge") solid += 1;
    const order = Math.max(0, solid);
    const known = curve[axis].map((place, index) => index).filter((index) => curve[axis][index] !== null);
    return {
      run: run.title, look: curve.look, name: curve.label, title: [isOneOfSeveral ? run.title : "", curve.label].filter(Boolean).join(", ") || run.title,
      colour: isOneOfSeveral ? run.colour : `var(--c${(run.index + (curve.look === "edge" ? 0 : order)) % 8})`,
      dash: isOneOfSeveral && curve.look !== "edge" ? DASHES[order % DASHES.length] : "",
      xs: known.map((index) => curve[axis][index]), ys: known.map((index) => curve.y[index]),
    };
  }).filter((line) => line.xs.length);
}

/** Where a restart stands on an axis; of tokens, at the first point of a curve that is not before it. */
function placeOf(restart, run, axis) {
  if (axis !== "tokens") return restart[axis];
  const curve = Object.values(run.curves).flat()[0];
  const index = curve ? curve.iteration.findIndex((iteration) => iteration >= restart.iteration) : -1;
  return index < 0 ? null : curve.tokens[index];
}

/** The index of the number next to `at` in ascending numbers; -1 if there are none. */
function nearest(numbers, at) {
  let low = 0, high = numbers.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < at) low = middle + 1; else high = middle;
  }
  return low > 0 && at - numbers[low - 1] < numbers[low] - at ? low - 1 : low < numbers.length ? low : -1;
}

function sample(colour, dash, look = "line") {
  const dots = look === "dots" ? [svg("circle", { cx: 13, cy: 5, r: 3.5, style: `fill: ${colour}` })] : [];
  return svg("svg", { width: 26, height: 10, "aria-hidden": "true" }, svg("path", { d: "M0 5H26", class: `curve ${look}`, "stroke-dasharray": dash, style: `stroke: ${colour}` }), ...dots);
}

const written = (words, properties) => Object.assign(svg("text", properties), { textContent: words });
