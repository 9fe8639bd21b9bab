// Draws a timeline on a canvas: a row of passes for every rank, thin lanes of communication below
// it. A pass can be pointed at, tapped, or reached by the arrow keys; what it waits for is drawn.
// Two views can share a scale of time: both then show the same part of it, and the same chosen pass.

import { drawAxis, drawFocus, drawPasses, drawSpans } from "./strokes.js";
import { prepared, theme } from "./words.js";

const AXIS = 24, GAP = 5, LANE = 4, TOP = 4;

export class TimelineView {
  /** `onFocus(pass, isChosen)` is told which pass is shown; `onView()` that the visible part changed. */
  constructor(canvas, { onFocus = () => {}, onView = () => {} } = {}) {
    Object.assign(this, { canvas, onFocus, onView, drawing: null, hovered: null, chosen: null, needs: null, partner: null });
    this.from = 0;
    this.to = 1;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** Shows a drawing; `needs` may be null, `inSeconds` says the unit of its times. */
  show(drawing, facts, needs, inSeconds) {
    this.part();
    Object.assign(this, { drawing, facts, needs, inSeconds, hovered: null, length: drawing.end });
    this.rows = drawing.ranks.map(({ passes, comms, waits }, rank) => ({
      passes: passes.map(([kind, microbatch, chunk, start, end, slice = 0, beside = ""], index) => ({ rank, index, kind, microbatch, chunk, slice, start, end, beside })),
      lanes: packed(comms),
      waits,
    }));
    this.byName = new Map(this.rows.flatMap((row) => row.passes.map((pass) => [nameOf(pass), pass])));
    const chosen = this.chosen && this.byName.get(nameOf(this.chosen));
    this.chosen = chosen ?? null;
    this.draw();
    this.onFocus(this.shown, Boolean(this.chosen));
  }

  get shown() { return this.hovered ?? this.chosen; }

  /** Shares a scale of time with a view of the same passes, `unit` of whose time is 1 of this one's. */
  join(other, unit) {
    Object.assign(this, { partner: other });
    Object.assign(other, { partner: this });
    this.stretch(Math.max(this.drawing.end, other.drawing.end / unit));
    Object.assign(other, { length: this.length * unit, from: this.from, to: this.to });
    other.draw();
    other.chooseSame(this.chosen);
    this.draw();
    this.onView();
  }

  /** Goes back to a scale of its own. */
  part() {
    const other = this.partner;
    if (!other) return;
    for (const view of [this, other]) {
      view.partner = null;
      view.stretch(view.drawing.end);
      view.draw();
      view.onView();
    }
  }

  /** Sets how much time the whole width stands for; what is visible of a part stays. */
  stretch(length) {
    if (this.isPart) {
      const [from, to] = this.times.map((at) => at / length);
      this.to = rounded(Math.min(1, to));
      this.from = rounded(Math.min(from, this.to - 1e-4));
    }
    this.length = length;
  }

  /** Whether only a part of the time is visible. */
  get isPart() { return this.to - this.from < 1; }

  /** The times between which all is visible. */
  get times() { return [this.from * this.length, this.to * this.length]; }

  /** Makes a part of the time visible, as shares of the whole. */
  see(from, to) {
    const length = Math.min(1, Math.max(to - from, 1e-4));
    this.from = rounded(Math.min(Math.max(0, from), 1 - length));
    this.to = rounded(this.from + length);
    for (const view of this.partner ? [this, this.partner] : [this]) {
      Object.assign(view, { from: this.from, to: this.to });
      view.draw();
      view.onView();
    }
  }

  /** Zooms around a share of the whole time; the chosen pass stays in view. */
  zoom(factor, centre = this.middle) {
    this.see(centre - (centre - this.from) * factor, centre + (this.to - centre) * factor);
  }

  get middle() {
    const { chosen, length, from, to } = this;
    return chosen ? (chosen.start + chosen.end) / 2 / length : (from + to) / 2;
  }

  choose(pass, isRevealed = true) {
    this.chosen = pass ?? null;
    this.hovered = null;
    if (isRevealed) this.reveal();
    this.draw();
    this.onFocus(this.shown, Boolean(this.chosen));
    this.partner?.chooseSame(this.chosen);
  }

  /** Chooses the pass that has the name of one in the other view. */
  chooseSame(pass) {
    this.chosen = (pass && this.byName.get(nameOf(pass))) ?? null;
    this.draw();
    this.onFocus(this.shown, Boolean(this.chosen));
  }

  /** Chooses the pass that a link names, whether it is in the visible part or not. */
  chooseNamed(rank, kind, microbatch, chunk, slice) { this.choose(this.byName.get(nameOf({ rank, kind, microbatch, chunk, slice })), false); }

  reveal() {
    const { chosen, length, from, to } = this;
    if (!chosen) return;
    const [start, end] = [chosen.start / length, chosen.end / length];
    if (start < from || end > to) this.see((start + end - to + from) / 2, (start + end + to - from) / 2);
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!this.drawing || !width || this.canvas.hidden) return;
    const ranks = this.rows.length;
    this.box = ranks > 24 ? 12 : ranks > 12 ? 15 : ranks > 6 && width > 600 ? 19 : 23;
    this.left = width < 500 ? 24 : 52;
    this.width = width - this.left - 8;
    let y = TOP;
    for (const row of this.rows) {
      row.y = y;
      y += this.box + 1 + row.lanes.length * (LANE + 1) + GAP;
    }
    const context = prepared(this.canvas, width, y + AXIS);
    const colours = theme();
    this.rows.forEach((row, rank) => {
      context.fillStyle = colours.soft;
      context.textAlign = "left";
      context.fillText(this.left < 50 ? rank : `rank ${rank}`, 0, row.y + this.box / 2);
      context.fillStyle = colours.idle;
      const end = Math.min(this.x(this.drawing.end), this.left + this.width);
      context.fillRect(this.left, row.y, Math.max(0, end - this.left), this.box);
    });
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.width, y);
    context.clip();
    for (const row of this.rows) {
      drawPasses(context, this, row.passes, row.y);
      row.lanes.forEach((lane, number) => drawSpans(context, this, lane, row.y + this.box + 1 + number * (LANE + 1), LANE));
    }
    if (this.shown) drawFocus(context, this, this.shown, colours);
    context.restore();
    drawAxis(context, this, y, colours);
  }

  /** Pixels from the left of a time. */
  x(at) { return this.left + (at / this.length - this.from) / (this.to - this.from) * this.width; }

  passAt(x, y) {
    const row = this.rows?.find((own) => y >= own.y - 2 && y <= own.y + this.box + 2);
    return row?.passes.findLast((pass) => this.x(pass.start) <= x && x <= Math.max(this.x(pass.end), this.x(pass.start) + 3));
  }

  hover(pass) {
    if (pass === this.hovered) return;
    this.hovered = pass ?? null;
    this.draw();
    this.onFocus(this.shown, !this.hovered && Boolean(this.chosen));
  }

  listen() {
    const { canvas } = this;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.offsetX, from: this.from, to: this.to, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag && Math.abs(event.offsetX - drag.x) > 4) drag.moved = true;
      if (drag?.moved) {
        const shift = (drag.x - event.offsetX) / this.width * (drag.to - drag.from);
        this.see(drag.from + shift, drag.to + shift);
      } else if (event.pointerType === "mouse") this.hover(this.passAt(event.offsetX, event.offsetY));
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) this.choose(this.passAt(event.offsetX, event.offsetY));
      drag = null;
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const centre = this.from + (event.offsetX - this.left) / this.width * (this.to - this.from);
      this.zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, centre);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const act = { "+": () => this.zoom(0.5), "-": () => this.zoom(2), Escape: () => this.choose(null) }[event.key]
        ?? (event.key.startsWith("Arrow") ? () => this.choose(this.beside(event.key)) : null);
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }

  /** The pass that an arrow key leads to: before or after, or about the same time on another rank. */
  beside(key) {
    const now = this.chosen;
    if (!now) return this.rows[0].passes.find((pass) => pass.end >= this.times[0]);
    const row = this.rows[now.rank].passes;
    if (key === "ArrowLeft") return row[now.index - 1] ?? now;
    if (key === "ArrowRight") return row[now.index + 1] ?? now;
    const other = this.rows[now.rank + (key === "ArrowDown" ? 1 : -1)]?.passes ?? [];
    const distance = (pass) => Math.abs(pass.start + pass.end - now.start - now.end);
    return other.reduce((best, pass) => (distance(pass) < distance(best) ? pass : best), other[0]) ?? now;
  }
}

/** As links have it, so that they show the same. */
const rounded = (share) => Number(share.toFixed(5));

const nameOf = ({ rank, kind, microbatch, chunk, slice }) => `${rank} ${kind} ${microbatch} ${chunk} ${slice}`;

/** Spreads communications over as few lanes as keep them apart. */
function packed(comms) {
  const lanes = [];
  for (const span of [...comms].sort((a, b) => a[3] - b[3] || a[4] - b[4])) {
    const free = lanes.find((lane) => lane.at(-1)[4] <= span[3]);
    if (free) free.push(span);
    else lanes.push([span]);
  }
  return lanes;
}
