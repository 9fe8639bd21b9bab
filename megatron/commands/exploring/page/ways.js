// The ways to run a job that plan-pretraining has looked at: time against memory. A chosen way shows
// its flags and its timeline, which is of the plan of few microbatches by which it was estimated.

import { Superseded } from "./engine.js";
import { axes, labelPlaces, limit, pointMark, redrawn, scales } from "./plot.js";
import { TimelineView } from "./timeline.js";
import { element, gibibytes, passName, percent, table, time } from "./words.js";

const ROLES = { taken: "taken", unsplit: "best without a split vocabulary", "runner-up": "runner-up", obstacle: "faster, does not fit" };

export class Ways {
  /** `channel` answers, `drawLegend(drawing, id)` names the colours of a timeline. */
  constructor(channel, facts, drawLegend) {
    Object.assign(this, { channel, facts, drawLegend, ways: facts.ways.ways.map((way) => ({ ...way, time: way.seconds, memory: way.bytes })) });
    this.view = new TimelineView(element("way-plan"), { onFocus: (pass) => this.tellPass(pass) });
    const { model, gpus } = facts.ways;
    element("ways").hidden = false;
    element("ways-title").textContent = `Ways for ${modelName(model)} on ${gpus.count.toLocaleString("en")} ${gpus.name}`;
    element("ways-hint").textContent = `plan-pretraining looked at ${this.ways.length} ways to run this job. Down and to the left is better; points that do not fit are hollow, and the line is the room for tensors. Choose a point to see its flags and its plan.`;
    new ResizeObserver(() => this.draw()).observe(element("ways-plot"));
    this.tabulate();
    this.take(this.ways.find((way) => way.role === "taken") ?? this.ways[0]);
  }

  draw() {
    const rooms = this.ways.map((way) => way.bytes + way.bytes_left);
    const room = Math.max(...rooms);
    redrawn(element("ways-plot"), "Time against memory of all ways", (width, height) => {
      const scale = scales(this.ways, width, height, true, [room]);
      const line = scale.y(room / 2 ** 30), names = this.ways.map((way) => this.labelOf(way));
      const ranks = this.ways.map((way) => (way.role === "taken" ? 3 : way.role === "unsplit" ? 2 : Number(way === this.chosen)));
      const places = labelPlaces(this.ways, names, ranks, [[0, line - 1, width, line + 1]], scale);
      return [
        ...axes(scale), ...limit(`line: room of ${gibibytes(room)}`, room / 2 ** 30, scale),
        ...this.ways.map((way, index) => this.mark(way, index, scale, names[index], places[index]))];
    });
  }

  mark(way, index, scale, name, place) {
    const kind = `${way.fits ? "fits" : "lacks"} ${way.role}${way === this.chosen ? " own" : ""}`;
    const r = way.role === "taken" ? 7 : way.role === "unsplit" || way === this.chosen ? 6 : 4.5;
    const group = pointMark(way, index, scale, { kind, r, name, place, words: `${figuresOf(way)} ${way.words.join(" ")}` }, () => this.take(way));
    for (const event of ["pointerenter", "focus"]) group.addEventListener(event, () => this.tell(way));
    for (const event of ["pointerleave", "blur"]) group.addEventListener(event, () => this.tell(this.chosen));
    return group;
  }

  labelOf(way) { return { taken: "taken", unsplit: "vocabulary not split" }[way.role] ?? `way ${way.number}`; }

  /** Shows the figures and the flags of a way. */
  tell(way) {
    element("way-details").textContent = figuresOf(way);
    element("way-words").textContent = way.words.join(" ");
  }

  /** Opens a way: its flags stay, and its timeline is drawn. */
  async take(way) {
    this.chosen = way;
    this.tell(way);
    this.draw();
    try {
      const found = await this.channel.ask({ action: "way", number: way.number });
      if (way === this.chosen) this.render(way, found);
    } catch (error) {
      if (error instanceof Superseded || way !== this.chosen) return;
      this.render(way, null, error.message);
    }
  }

  render(way, found, fault = "") {
    const canvas = element("way-plan");
    canvas.hidden = found === null;
    element("way-legend").hidden = found === null;
    element("way-fault").hidden = !fault;
    element("way-fault").textContent = fault;
    element("way-hint").textContent = found ? `${timelineOf(way)}: ${time(found.total, true)}, idle ${percent(found.idle)}. Point at a pass, or focus the timeline and use the arrow keys; + and − zoom.` : "";
    if (found) {
      canvas.setAttribute("aria-label", `Timeline of way ${way.number}`);
      Object.assign(this.view, { from: 0, to: 1, chosen: null });
      this.view.show(found.drawing, this.facts, null, true);
      this.drawLegend(found.drawing, "way-legend");
    }
    document.body.dataset.way = way.number;
  }

  tellPass(pass) {
    element("way-pass").textContent = pass
      ? `${passName(pass.kind, pass.microbatch, pass.chunk, pass.slice)} on rank ${pass.rank}, ${this.facts.meanings[pass.kind]}: ${time(pass.start, true)} to ${time(pass.end, true)}, takes ${time(pass.end - pass.start, true)}`
      : "";
  }

  tabulate() {
    element("ways-table").replaceChildren(table(
      ["way", "", "time", "memory", "left", "MFU", "layout", "schedule", "vocabulary", "flags"],
      this.ways.map((way) => [
        String(way.number), ROLES[way.role] ?? (way.fits ? "" : "does not fit"), time(way.seconds, true), gibibytes(way.bytes), gibibytes(way.bytes_left),
        percent(way.mfu), layoutOf(way), way.schedule, way.vocabulary, way.words.join(" ")])));
  }
}

/** The name of a model: of its folder, if its file is called as all are. */
function modelName(model) {
  if (model === null) return "a model by its flags";
  return model.split("/").filter((part) => part && part !== "config.json").at(-1) ?? model;
}

const layoutOf = ({ layout }) => Object.entries(layout).filter(([, size]) => size > 1).map(([letter, size]) => `${letter} ${size}`).join(", ") || "one GPU";

/** A way in a sentence: its part in the answer, its layout, its time and its memory. */
function figuresOf(way) {
  const role = way.role ? ` (${ROLES[way.role]})` : "";
  const left = way.bytes_left < 0 ? `lacks ${gibibytes(-way.bytes_left)}` : way.fits ? `${gibibytes(way.bytes_left)} left` : "does not fit the memory of its hosts";
  return `Way ${way.number}${role}: ${layoutOf(way)}, ${way.schedule}, ${way.vocabulary}: ${time(way.seconds, true)} an iteration${way.planned ? "" : ", estimated"}, ${Math.round(way.tokens_per_second).toLocaleString("en")} tokens/s, MFU ${percent(way.mfu)}, ${gibibytes(way.bytes)} on the fullest rank, ${left}.`;
}

/** What a way's timeline is of. */
function timelineOf({ timeline_microbatches: few, microbatches: all }) {
  return few < all
    ? `Timeline of a plan of ${few} microbatches, by which the time of ${all} was estimated`
    : `Timeline of all ${all} microbatches`;
}
