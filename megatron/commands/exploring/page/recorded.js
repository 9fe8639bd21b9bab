// A recorded timeline beside the plan: a file that is dropped or opened, and how the two compare.

import { TimelineView } from "./timeline.js";
import { element, made, passName, percent, short, table, time } from "./words.js";

export class Recorded {
  /**
   * `plan` is the view of the plan, `ask(text)` returns what Python says of a timeline, and `idle()`
   * waits until it may be asked.
   */
  constructor(plan, idle, ask) {
    Object.assign(this, { plan, idle, ask });
    this.text = null;
    this.view = new TimelineView(element("recorded-plan"), { onFocus: (pass) => this.tell(pass) });
    const section = element("recorded");
    section.addEventListener("dragover", (event) => {
      event.preventDefault();
      section.classList.add("dropping");
    });
    section.addEventListener("dragleave", () => section.classList.remove("dropping"));
    section.addEventListener("drop", (event) => {
      event.preventDefault();
      section.classList.remove("dropping");
      this.open(event.dataTransfer.files[0]);
    });
    element("recorded-file").addEventListener("change", (event) => this.open(event.target.files[0]));
    element("recorded-close").addEventListener("click", () => this.close());
  }

  async open(file) {
    if (!file) return;
    this.text = await file.text();
    this.name = file.name;
    await this.idle();
    await this.update();
  }

  /** Compares with what is planned now, if a timeline is open. */
  async update(facts = this.facts) {
    this.facts = facts;
    if (this.text === null) return;
    try {
      this.render(await this.ask(this.text));
    } catch (error) {
      if (error.message) this.close(`${this.name}: ${error.message}`);
    }
  }

  render(found) {
    const canvas = element("recorded-plan");
    canvas.hidden = false;
    element("recorded-close").hidden = false;
    canvas.setAttribute("aria-label", `Recorded timeline ${this.name}`);
    element("recorded-hint").textContent = `${this.name}: time ${time(found.total, true)}, idle ${percent(found.idle)}. ${found.comparison ? scale(found.unit) : `On a scale of its own, not compared with the plan: ${found.why}`}`;
    this.view.show(found.drawing, this.facts, null, true);
    if (found.comparison) this.plan.join(this.view, found.unit);
    element("recorded-table").replaceChildren(...(found.comparison ? [compared(found.comparison, found.unit)] : []));
  }

  close(message = "") {
    this.text = null;
    this.view.part();
    element("recorded-plan").hidden = true;
    element("recorded-close").hidden = true;
    element("recorded-file").value = "";
    element("recorded-table").replaceChildren();
    element("recorded-details").textContent = "";
    element("recorded-hint").textContent = message || "Drop a file here that --record-timeline wrote, to see it beside the plan. It stays on this machine.";
  }

  tell(pass) {
    element("recorded-details").textContent = pass
      ? `${passName(pass.kind, pass.microbatch, pass.chunk, pass.slice)} on rank ${pass.rank}: ${time(pass.start, true)} to ${time(pass.end, true)}, takes ${time(pass.end - pass.start, true)}`
      : "";
  }
}

/** How the plan's time compares, of which one unit takes so many seconds. */
function scale(unit) {
  return `On the plan's scale of time${unit === 1 ? "" : `, of which 1 is taken as ${time(unit, true)}, so that all passes together take as long in both`}.`;
}

/** Both timelines in numbers, in seconds, of which 1 of the plan's time takes so many. */
function compared({ total, idle, passes, overlap }, unit) {
  const row = (name, { planned, real, ratio }) => [name, time(planned * unit, true), time(real, true), ratio == null ? "" : short(ratio / unit)];
  return made("div", {}, table(["", "planned", "recorded", "recorded / planned"], [
    row("time of the iteration", total),
    ["idle", percent(idle.planned), percent(idle.real), ""],
    ...Object.entries(passes).map(([kind, times]) => row(`mean ${kind}`, times)),
    ...Object.entries(overlap).map(([kind, own]) => [`${kind} beside passes`, percent(own.planned), percent(own.real), ""]),
  ]));
}
