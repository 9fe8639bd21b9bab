// A plot of time against memory: its scales and axes, labels that cover nothing, and points that
// the Tab key reaches and Enter takes.

import { short, svg, ticks, time } from "./words.js";

const LEFT = 52, RIGHT = 24, TOP = 14, BOTTOM = 40;

/** Where times and memory lie, so that all points (`time`, `memory`) and all `limits` of memory are seen. */
export function scales(points, width, height, inSeconds, limits = []) {
  const range = (values) => {
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const room = (most - least > 1e-6 * most ? most - least : most || 1) * 0.08;
    return [Math.max(0, least - room), most + room];
  };
  const unit = inSeconds ? 2 ** 30 : 1;
  const [t0, t1] = range(points.map((point) => point.time));
  const [h0, h1] = range([...points.map((point) => point.memory), ...limits].map((held) => held / unit));
  return {
    width, height, inSeconds,
    times: ticks(t0, t1, (width - LEFT - RIGHT) / 80), helds: ticks(h0, h1, (height - TOP - BOTTOM) / 36),
    x: (at) => LEFT + (at - t0) / (t1 - t0) * (width - LEFT - RIGHT),
    y: (held) => height - BOTTOM - (held - h0) / (h1 - h0) * (height - TOP - BOTTOM),
    held: (point) => point.memory / unit,
  };
}

export function axes({ times, helds, x, y, width, height, inSeconds }) {
  return [
    ...helds.flatMap((held) => [
      svg("path", { class: "rule", d: `M${LEFT} ${y(held)}H${width - RIGHT}` }),
      written(short(held), { x: LEFT - 8, y: y(held) + 4, class: "end" })]),
    ...times.map((at) => written(time(at, inSeconds), { x: x(at), y: height - BOTTOM + 18, class: "middle" })),
    written("time of an iteration", { x: width - RIGHT, y: height - 6, class: "end" }),
    written(inSeconds ? "GiB on the fullest rank" : "microbatches on the fullest rank", { x: LEFT, y: 10 }),
  ];
}

/** A limit of memory across the plot; its name stands above the plot, where no point is. */
export function limit(name, held, { y, width }) {
  return [
    svg("path", { class: "limit", d: `M${LEFT} ${y(held)}H${width - RIGHT}` }),
    written(name, { x: width - RIGHT, y: 10, class: "end" }),
  ];
}

/**
 * A place for each point's label, or null: clear of other labels, of points and of `lines`, which are
 * boxes of left, top, right and bottom. Labels of a higher `rank` choose first; of rank 0 there are none.
 */
export function labelPlaces(points, names, ranks, lines, { x, y, held, width, height }) {
  const at = points.map((point) => [x(point.time), y(held(point))]);
  const taken = [...at.map(([cx, cy]) => [cx - 6, cy - 6, cx + 6, cy + 6]), ...lines];
  const places = points.map(() => null);
  for (const index of [...places.keys()].sort((a, b) => ranks[b] - ranks[a])) {
    if (ranks[index]) places[index] = labelPlace(...at[index], labelWidth(names[index]), taken, width, height);
  }
  return places;
}

/** A point as a button; `r` is its radius, `place` where its `name` stands, `words` what it tells. */
export function pointMark(point, index, { x, y, held }, { kind, r, name, place, words }, onTake) {
  const group = svg("g", { class: `point ${kind}`, tabindex: 0, role: "button", "aria-label": words, "data-index": index });
  group.append(Object.assign(svg("title", {}), { textContent: words }), svg("circle", { cx: x(point.time), cy: y(held(point)), r }));
  if (place) group.append(written(name, place));
  group.addEventListener("click", onTake);
  group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); onTake(); } });
  return group;
}

/** Draws a plot anew in its place: `draw(width, height)` returns its parts; the focused point stays so. */
export function redrawn(host, label, draw) {
  const width = host.clientWidth;
  if (!width) return;
  const focused = host.querySelector(":focus")?.dataset.index;
  const height = Math.max(260, Math.min(380, width * 0.55));
  host.replaceChildren(svg("svg", { width, height, role: "group", "aria-label": label }, ...draw(width, height)));
  if (focused !== undefined) host.querySelector(`[data-index="${focused}"]`)?.focus();
}

const written = (words, properties) => Object.assign(svg("text", properties), { textContent: words });

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
