// Draws what every rank holds over time: a row of one scale for each, its peak beside it.

import { drawAxis } from "./strokes.js";
import { element, gibibytes, prepared, short, theme, time } from "./words.js";

const AXIS = 24, GAP = 6;

export class MemoryView {
  /** `plan` is the view of the plan above, whose visible part of the time this one shows too. */
  constructor(canvas, plan) {
    Object.assign(this, { canvas, plan, ranks: null });
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerdown", (event) => this.point(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => this.point(-1, -1));
  }

  /** Shows the steps of every rank, in bytes or in microbatches; `limit` may be null. */
  show(ranks, inBytes, limit) {
    Object.assign(this, { ranks, limit });
    this.words = inBytes ? gibibytes : short;
    this.peaks = ranks.map((steps) => steps.reduce((most, [, held]) => Math.max(most, held), 0));
    this.most = Math.max(...this.peaks, limit && limit < 1.5 * Math.max(...this.peaks) ? limit : 0);
    element("memory-hint").textContent = inBytes
      ? `GiB that each rank holds: parameters, gradients, optimizer, activations, logits. ${limit ? `Tensors can use ${gibibytes(limit)} of this GPU${this.most >= limit ? " (the line)" : ""}.` : ""}`
      : "Microbatches whose activations each rank holds, from F to B, or to W where it is a pass of its own.";
    this.canvas.setAttribute("aria-label", `Memory over time. Peaks by rank: ${this.peaks.map(this.words).join(", ")}`);
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth, { plan } = this;
    if (!this.ranks || !width || !plan.drawing) return;
    this.height = this.ranks.length > 12 ? 16 : 26;
    Object.assign(this, { left: plan.left, width: plan.width });
    const y = this.ranks.length * (this.height + GAP);
    const context = prepared(this.canvas, width, y + AXIS), colours = theme();
    const frame = { ...this, x: (at) => this.x(at), from: plan.from, to: plan.to, length: plan.length, inSeconds: plan.inSeconds };
    this.ranks.forEach((steps, rank) => this.drawRank(context, colours, steps, rank));
    drawAxis(context, frame, y, colours);
  }

  x(at) { return this.left + (at / this.plan.length - this.plan.from) / (this.plan.to - this.plan.from) * this.width; }

  drawRank(context, colours, steps, rank) {
    const top = rank * (this.height + GAP), base = top + this.height;
    const y = (held) => base - held / this.most * this.height;
    context.fillStyle = colours.soft;
    context.textAlign = "left";
    context.fillText(this.left < 50 ? rank : `rank ${rank}`, 0, top + this.height / 2);
    const full = this.limit && this.peaks[rank] > this.limit;
    context.save();
    context.beginPath();
    context.rect(this.left, top - 1, this.width, this.height + 2);
    context.clip();
    context.beginPath();
    context.moveTo(this.x(0), base);
    let held = 0;
    for (const [at, next] of steps) {
      context.lineTo(this.x(at), y(held));
      context.lineTo(this.x(at), y(held = next));
    }
    context.lineTo(this.x(this.plan.drawing.end), y(held));
    context.lineTo(this.x(this.plan.drawing.end), base);
    context.fillStyle = full ? colours.full : colours.area;
    context.fill();
    context.restore();
    context.fillStyle = colours.ink;
    context.textAlign = "right";
    context.fillText(this.words(this.peaks[rank]), this.left + this.width - 4, top + this.height / 2 + 1);
    context.fillStyle = colours.line;
    context.fillRect(this.left, base, this.width, 1);
    if (this.limit && this.most >= this.limit) {
      context.fillStyle = colours.warn;
      context.fillRect(this.left, y(this.limit), this.width, 1);
    }
  }

  point(x, y) {
    if (!this.ranks || !this.plan.drawing) return;
    const rank = Math.floor(y / (this.height + GAP)), { plan } = this;
    const at = (plan.from + (x - this.left) / this.width * (plan.to - plan.from)) * plan.length;
    const steps = this.ranks[rank];
    const text = !steps || x < this.left || x > this.left + this.width ? "" :
      `rank ${rank} at ${time(at, plan.inSeconds)}: holds ${this.words(steps.findLast(([begin]) => begin <= at)?.[1] ?? 0)}, ${this.words(this.peaks[rank])} at most`;
    element("memory-details").textContent = text;
  }
}
