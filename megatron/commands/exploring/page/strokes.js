// The strokes of a timeline: passes with their numbers, communications, arrows and the axis.

import { ticks, time } from "./words.js";

const BAR = 2.5, INSET = 1.5; // the bar over a pair: its height, and how far it stays from the pair's ends
const EDGE = "rgba(31, 35, 40, 0.4)", INK = "#1f2328"; // on the passes' own colours, in both themes

/** Passes as boxes; a box shows its microbatch's number if it has room for it, and a bar lies over a pair. */
export function drawPasses(context, view, passes, y) {
  const { colours, later_chunk_opacity: paler } = view.facts;
  context.textAlign = "center";
  for (const { kind, microbatch, chunk, start, end, beside } of passes) {
    const x = view.x(start), width = view.x(end) - x;
    if (width <= 0 || x > view.left + view.width || x + width < view.left) continue;
    context.globalAlpha = 1;
    context.fillStyle = "#ffffff"; // a paler chunk is paler on dark ground too
    if (chunk) context.fillRect(x, y, width, view.box);
    context.globalAlpha = chunk ? paler : 1;
    context.fillStyle = colours[kind];
    context.fillRect(x, y, width, view.box);
    context.globalAlpha = 1;
    if (width > 2.5) {
      context.strokeStyle = EDGE;
      context.lineWidth = 0.5;
      context.strokeRect(x, y, width, view.box);
    }
    if (beside) {
      const inset = Math.min(INSET, width / 2);
      context.fillStyle = INK;
      context.fillRect(kind === "F" ? x + inset : x, y, width - inset, BAR);
    }
    const label = String(microbatch);
    if (width >= 6.5 * label.length + 3 && view.box > 12) {
      context.fillStyle = INK;
      context.fillText(label, x + width / 2, y + view.box / 2 + 0.5);
    }
  }
}

/** Communications as thin bars. */
export function drawSpans(context, view, spans, y, height) {
  for (const [kind, , , start, end] of spans) {
    const x = view.x(start);
    context.fillStyle = view.facts.colours[kind];
    context.fillRect(x, y, Math.max(view.x(end) - x, 0.5), height);
  }
}

/** The pass that is shown, with arrows from what it waits for, and paler ones to what waits for it. */
export function drawFocus(context, view, pass, colours) {
  const named = (list) => (list ?? []).map(({ rank, kind, chunk, slice }) => view.byName.get(`${rank} ${kind} ${pass.microbatch} ${chunk} ${slice}`)).filter(Boolean);
  const before = named(view.needs?.before(pass)), after = named(view.needs?.after(pass));
  if (pass === view.chosen) {
    context.globalAlpha = 0.5;
    context.fillStyle = colours.panel;
    context.fillRect(view.left, 0, view.width, 1e4);
    for (const own of [...before, ...after, pass]) drawPasses(context, view, [own], view.rows[own.rank].y);
  }
  for (const user of after) drawArrow(context, view, pass, user, 0.45);
  for (const need of before) drawArrow(context, view, need, pass, 1);
  const x = view.x(pass.start);
  context.lineWidth = 2;
  context.strokeStyle = colours.accent;
  context.strokeRect(x, view.rows[pass.rank].y, Math.max(view.x(pass.end) - x, 2), view.box);
}

/** An arrow from the end of a pass to the start of another, with a halo that sets it off. */
function drawArrow(context, view, from, to, alpha) {
  const middle = (own) => view.rows[own.rank].y + view.box / 2;
  const [x0, y0, x1, y1] = [view.x(from.end), middle(from), view.x(to.start), middle(to)];
  const bend = Math.max(12, Math.abs(x1 - x0) / 2);
  const line = new Path2D(`M${x0} ${y0}C${x0 + bend} ${y0} ${x1 - bend} ${y1} ${x1} ${y1}`);
  const head = new Path2D(`M${x1} ${y1}l-7 -3.5v7z`);
  for (const [colour, width] of [["#ffffff", 4], [INK, 1.5]]) {
    context.globalAlpha = alpha;
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = width;
    context.stroke(line);
    if (width > 2) context.stroke(head);
    context.fill(head);
  }
  context.globalAlpha = 1;
}

/** The axis below the rows, with round numbers. */
export function drawAxis(context, view, y, colours) {
  const end = view.length;
  context.fillStyle = colours.soft;
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(view.left, y + 0.5);
  context.lineTo(view.left + view.width, y + 0.5);
  for (const tick of ticks(view.from * end, view.to * end, view.width / 70)) {
    const x = view.x(tick), text = time(tick, view.inSeconds);
    const half = context.measureText(text).width / 2;
    context.moveTo(x, y);
    context.lineTo(x, y + 4);
    context.textAlign = "center";
    context.fillText(text, Math.min(x, view.left + view.width + 8 - half), y + 13);
  }
  context.stroke();
}
