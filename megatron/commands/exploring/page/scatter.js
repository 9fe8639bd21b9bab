// Time against memory of all schedules, with the Pareto front: none on it can be beaten in one
// without being worse in the other. Each point can be reached by the Tab key and taken by Enter.

import { axes, labelPlaces, pointMark, redrawn, scales } from "./plot.js";
import { element, gibibytes, percent, short, svg, table, time } from "./words.js";

const MOST_LABELS = 20; // points from which only the front and the own one have labels

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
    if (!this.points.length) return;
    redrawn(element("scatter"), "Time against memory of all schedules", (width, height) => {
      const scale = scales(this.points, width, height, this.inSeconds);
      const corners = this.frontCorners(scale);
      const places = this.labelPlaces(scale, corners);
      return [
        ...axes(scale),
        svg("path", { class: "front", d: corners.map(([x, y], index) => `${index ? "L" : "M"}${x} ${y}`).join("") }),
        ...this.points.map((point, index) => pointMark(point, index, scale, this.look(point, index, places[index]), () => this.onTake(point)))];
    });
  }

  /** The corners of the front's line: from each of its points to the next in time, then in memory. */
  frontCorners({ x, y, held }) {
    const best = this.points.filter((_, index) => this.front.has(index)).sort((a, b) => a.time - b.time);
    return best.flatMap((point, index) => {
      const [cx, cy] = [x(point.time), y(held(point))];
      return index ? [[cx, y(held(best[index - 1]))], [cx, cy]] : [[cx, cy]];
    });
  }

  /** Places of labels that the front does not cross; its points choose theirs first, the own one before. */
  labelPlaces(scale, corners) {
    const lines = corners.slice(1).map(([x, y], index) => {
      const [px, py] = corners[index];
      return [Math.min(x, px) - 1, Math.min(y, py) - 1, Math.max(x, px) + 1, Math.max(y, py) + 1];
    });
    const all = Number(this.points.length < MOST_LABELS);
    const ranks = this.points.map((point, index) => {
      const first = Number(this.isOwn(point)) * 2 + Number(this.front.has(index));
      return first ? first + 1 : all;
    });
    return labelPlaces(this.points, this.points.map((point) => this.nameOf(point)), ranks, lines, scale);
  }

  look(point, index, place) {
    const best = this.front.has(index), own = this.isOwn(point);
    const name = this.nameOf(point);
    const words = `${name}: time ${time(point.time, this.inSeconds)}, idle ${percent(point.idle)}, ${this.memory(point.memory)} held${best ? ", on the Pareto front" : ""}${point.cut ? ", its search was cut short" : ""}`;
    return { kind: `${best ? "best" : ""}${own ? " own" : ""}`, r: own ? 7 : best ? 5 : 4, name, place, words };
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
