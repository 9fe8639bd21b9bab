// Time against memory of all schedules, with the Pareto front: none on it can be beaten in one
// without being worse in the other. Each point can be reached by the Tab key and taken by Enter.

import { element, gibibytes, made, percent, short, table, ticks, time } from "./words.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const LEFT = 52, RIGHT = 24, TOP = 14, BOTTOM = 40;

export class Scatter {
  /** `onTake(point)` is called when the reader takes a point. */
  constructor(onTake) {
    this.onTake = onTake;
    this.points = [];
    new ResizeObserver(() => this.draw()).observe(element("scatter"));
  }

  show(points, front, own) {
    this.inSeconds = own.model !== null;
    Object.assign(this, { points, front: new Set(front), own, memory: this.inSeconds ? gibibytes : short });
    this.draw();
    this.tabulate();
  }

  /** Marks another case as what is shown. */
  mark(own) {
    this.own = own;
    this.draw();
  }

  clear() {
    this.points = [];
    element("scatter").replaceChildren();
    element("compare-details").hidden = true;
  }

  draw() {
    const host = element("scatter"), width = host.clientWidth;
    if (!this.points.length || !width) return;
    const focused = host.querySelector(":focus")?.dataset.index;
    const height = Math.max(260, Math.min(380, width * 0.55));
    const scale = this.scales(width, height);
    const places = this.labelPlaces(scale, width, height);
    host.replaceChildren(svg("svg", { width, height, role: "group", "aria-label": "Time against memory of all schedules" },
      ...this.axes(scale, width, height),
      svg("path", { class: "front", d: this.frontPath(scale) }),
      ...this.points.map((point, index) => this.pointMark(point, index, scale, places[index]))));
    if (focused !== undefined) host.querySelector(`[data-index="${focused}"]`)?.focus();
  }

  scales(width, height) {
    const range = (values) => {
      const [least, most] = [Math.min(...values), Math.max(...values)];
      const room = (most - least || most || 1) * 0.08;
      return [Math.max(0, least - room), most + room];
    };
    const unit = this.inSeconds ? 2 ** 30 : 1;
    const [t0, t1] = range(this.points.map((point) => point.time));
    const [h0, h1] = range(this.points.map((point) => point.memory / unit));
    return {
      times: ticks(t0, t1, (width - LEFT - RIGHT) / 80), helds: ticks(h0, h1, (height - TOP - BOTTOM) / 36),
      x: (at) => LEFT + (at - t0) / (t1 - t0) * (width - LEFT - RIGHT),
      y: (held) => height - BOTTOM - (held - h0) / (h1 - h0) * (height - TOP - BOTTOM),
      held: (point) => point.memory / unit,
    };
  }

  axes({ times, helds, x, y }, width, height) {
    const text = (words, properties) => Object.assign(svg("text", properties), { textContent: words });
    return [
      ...helds.flatMap((held) => [
        svg("path", { class: "rule", d: `M${LEFT} ${y(held)}H${width - RIGHT}` }),
        text(short(held), { x: LEFT - 8, y: y(held) + 4, class: "end" })]),
      ...times.map((at) => text(time(at, this.inSeconds), { x: x(at), y: height - BOTTOM + 18, class: "middle" })),
      text("time of an iteration", { x: width - RIGHT, y: height - 6, class: "end" }),
      text(this.inSeconds ? "GiB on the fullest rank" : "microbatches on the fullest rank", { x: LEFT, y: 10 }),
    ];
  }

  /** The corners of the front's line: from each of its points to the next in time, then in memory. */
  frontCorners({ x, y, held }) {
    const best = this.points.filter((_, index) => this.front.has(index)).sort((a, b) => a.time - b.time);
    return best.flatMap((point, index) => {
      const [cx, cy] = [x(point.time), y(held(point))];
      return index ? [[cx, y(held(best[index - 1]))], [cx, cy]] : [[cx, cy]];
    });
  }

  frontPath(scale) {
    return this.frontCorners(scale).map(([x, y], index) => `${index ? "L" : "M"}${x} ${y}`).join("");
  }

  /** A place for each point's label, or null: clear of other labels, of points and of the front. */
  labelPlaces(scale, width, height) {
    const corners = this.frontCorners(scale);
    const at = this.points.map((point) => [scale.x(point.time), scale.y(scale.held(point))]);
    const taken = [
      ...at.map(([cx, cy]) => [cx - 6, cy - 6, cx + 6, cy + 6]),
      ...corners.slice(1).map(([x, y], index) => {
        const [px, py] = corners[index];
        return [Math.min(x, px) - 1, Math.min(y, py) - 1, Math.max(x, px) + 1, Math.max(y, py) + 1];
      })];
    const places = this.points.map(() => null);
    const first = (index) => Number(this.isOwn(this.points[index])) * 2 + Number(this.front.has(index));
    for (const index of [...places.keys()].sort((a, b) => first(b) - first(a))) {
      if (first(index) || this.points.length < 20) places[index] = labelPlace(...at[index], labelWidth(this.nameOf(this.points[index])), taken, width, height);
    }
    return places;
  }

  pointMark(point, index, { x, y, held }, place) {
    const best = this.front.has(index), own = this.isOwn(point);
    const name = this.nameOf(point);
    const words = `${name}: time ${time(point.time, this.inSeconds)}, idle ${percent(point.idle)}, ${this.memory(point.memory)} held${best ? ", on the Pareto front" : ""}${point.cut ? ", its search was cut short" : ""}`;
    const group = svg("g", { class: `point${best ? " best" : ""}${own ? " own" : ""}`, tabindex: 0, role: "button", "aria-label": words, "data-index": index });
    const [cx, cy] = [x(point.time), y(held(point))];
    group.append(Object.assign(svg("title", {}), { textContent: words }), svg("circle", { cx, cy, r: own ? 7 : best ? 5 : 4 }));
    if (place) group.append(Object.assign(svg("text", place), { textContent: name }));
    const take = () => this.onTake(point);
    group.addEventListener("click", take);
    group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); take(); } });
    return group;
  }

  isOwn(point) { return point.schedule === this.own.schedule && point.vocab === this.own.vocab; }

  nameOf(point) {
    const several = this.points.some((other) => other.vocab !== this.points[0].vocab);
    return several ? `${point.schedule}, ${point.vocab}` : point.schedule;
  }

  tabulate() {
    const order = this.points.map((point, index) => ({ ...point, best: this.front.has(index) })).sort((a, b) => a.time - b.time);
    element("compare-table").replaceChildren(table(["schedule", "vocabulary", "time", "idle", "memory", "Pareto front"],
      order.map((point) => [point.schedule, point.vocab, time(point.time, this.inSeconds), percent(point.idle), this.memory(point.memory), point.best ? "yes" : ""])));
    element("compare-details").hidden = false;
  }
}

function svg(tag, properties, ...children) {
  const node = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(properties)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** The width of a label in pixels, in the bold type of the front's labels. */
function labelWidth(words) {
  const context = (labelWidth.canvas ??= document.createElement("canvas")).getContext("2d");
  context.font = `600 11.5px ${getComputedStyle(document.body).fontFamily}`;
  return context.measureText(words).width;
}

/** Where a label has room beside its point, or null; a place that is found is added to `taken`. */
function labelPlace(cx, cy, length, taken, width, height) {
  const tries = [];
  for (const far of [0, 14, 28]) {
    tries.push([cx + 9, cy + 4 - far], [cx - 9 - length, cy + 4 - far], [cx + 9, cy + 4 + far], [cx - 9 - length, cy + 4 + far],
      [cx - length / 2, cy - 10 - far], [cx - length / 2, cy + 18 + far]);
  }
  for (const [x, y] of tries) {
    const box = [x - 1, y - 10, x + length + 1, y + 3];
    const free = taken.every(([l, t, r, b]) => box[2] < l || box[0] > r || box[3] < t || box[1] > b);
    if (x >= LEFT && x + length <= width && y > TOP + 10 && y < height - BOTTOM && free) {
      taken.push(box);
      return { x, y };
    }
  }
  return null;
}
