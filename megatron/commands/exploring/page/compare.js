// Plans all schedules under the costs of what is shown, one after the other, and draws them.

import { Superseded } from "./engine.js";
import { Scatter } from "./scatter.js";
import { element } from "./words.js";

const AT_ONCE = 400; // ranks x microbatches up to which all are compared without being asked
const SECONDS = 5; // to search for each of the plans
const HINT = "Down and to the left is better. Filled points are on the Pareto front: none other is as good in both. Choose a point to see its plan.";

export class Comparison {
  /** `channel` answers; `onTake(point)` is called when the reader takes a point. */
  constructor(channel, onTake) {
    this.channel = channel;
    this.scatter = new Scatter(onTake);
    this.key = null;
    this.serial = 0;
  }

  /** Compares what is shown with all schedules, if that is quick or asked for. */
  async show(shown, facts, isAsked) {
    const key = keyOf(shown, element("all-treatments").checked);
    this.own = shown;
    if (key === this.key) { // compared already, or just now
      this.scatter.mark(shown);
      return;
    }
    const serial = ++this.serial;
    this.key = null;
    this.scatter.clear();
    if (shown.p * shown.m > AT_ONCE && !isAsked) {
      this.hint(`Searching for the plans of all schedules at this size takes a while: up to ${SECONDS} s each.`);
      return;
    }
    this.key = key;
    const points = [], missing = [];
    const left = (error) => error instanceof Superseded || serial !== this.serial;
    const pairs = pairsOf(shown, facts);
    for (const [index, [schedule, vocab]] of pairs.entries()) {
      this.hint(`Planning ${schedule}, ${vocab} (${index + 1} of ${pairs.length})`);
      const compared = { ...shown, vocab, plan: null, seconds: shown.seconds ?? SECONDS };
      try {
        points.push(await this.channel.ask({ action: "point", schedule, case: compared }));
        const { front } = await this.channel.ask({ action: "front", points });
        if (left()) return;
        this.scatter.show(points, front, this.own);
      } catch (error) {
        if (left(error)) return;
        missing.push(`${schedule}, ${vocab}: ${error.message}`);
      }
    }
    this.conclude(points, missing, shown);
  }

  conclude(points, missing, shown) {
    const cut = points.filter((point) => point.cut).map((point) => point.schedule);
    this.hint([
      HINT,
      cut.length ? `The search was ended after ${shown.seconds ?? SECONDS} s for ${cut.join(", ")}.` : "",
      missing.length ? `Without ${missing.join("; ")}` : "",
    ].filter(Boolean).join(" "));
    document.body.dataset.compared = points.length;
  }

  hint(text) { element("compare-hint").textContent = text; }
}

/** What all the compared plans follow from: not the schedule that is shown, nor an edited plan. */
function keyOf({ p, m, vocab, costs, waits, joined, output, again, model, replicas, ahead, seconds, limit }, all) {
  return JSON.stringify([p, m, all || vocab, costs, waits, joined, output, again, model, replicas, ahead, seconds, limit]);
}

function pairsOf(shown, { schedules, treatments }) {
  const vocabularies = element("all-treatments").checked ? Object.keys(treatments) : [shown.vocab];
  const names = Object.keys(schedules).filter((name) => !schedules[name].compares && (!schedules[name].needs_limit || shown.limit));
  return vocabularies.flatMap((vocab) => names.map((schedule) => [schedule, vocab]));
}
