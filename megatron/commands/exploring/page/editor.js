// Edits the row of a rank as text: the plan with the new row is checked and simulated by Python.

import { element, passName } from "./words.js";

export class Editor {
  /** `onEdit(plan)` takes the text of a whole plan, or null for that of the schedule. */
  constructor(onEdit) {
    this.onEdit = onEdit;
    this.rank = 0;
    this.lines = null;
    element("row").addEventListener("change", (event) => this.showRow(Number(event.target.value)));
    element("passes").addEventListener("input", () => this.edited());
    element("undo").addEventListener("click", () => onEdit(null));
    element("earlier").addEventListener("click", () => this.move(-1));
    element("later").addEventListener("click", () => this.move(1));
  }

  /** Shows a plan, which may have been edited. */
  show(plan, isEdited) {
    this.lines = plan.trimEnd().split("\n");
    this.first = this.lines.findIndex((line) => line.startsWith("0:"));
    const ranks = this.lines.length - this.first;
    element("row").replaceChildren(...Array.from({ length: ranks }, (_, rank) => new Option(rank, rank)));
    element("undo").hidden = !isEdited;
    this.fault("");
    this.showRow(Math.min(this.rank, ranks - 1));
  }

  showRow(rank) {
    this.rank = rank;
    element("row").value = rank;
    const text = this.lines[this.first + rank].replace(/^\d+: */, "");
    if (element("passes").value.trim() !== text) element("passes").value = text;
  }

  /** Shows why the plan with the new row cannot be run. */
  fault(message) {
    element("edit-fault").textContent = message;
    element("edit-fault").hidden = !message;
    element("passes").setAttribute("aria-invalid", Boolean(message));
  }

  /** The pass that Earlier and Later move; null: none. */
  choose(pass) {
    this.chosen = pass;
    if (pass && this.lines) this.showRow(pass.rank);
    element("earlier").disabled = element("later").disabled = !pass;
  }

  /** Moves the chosen pass by so many places; a pass of a pair takes the other one with it. */
  move(step) {
    const { rank, kind, microbatch, chunk, slice } = this.chosen;
    const words = this.lines[this.first + rank].replace(/^\d+: */, "").split(" ");
    const name = passName(kind, microbatch, chunk, slice);
    const at = words.findIndex((word) => word.split("|").includes(name)), to = at + step;
    if (at < 0 || to < 0 || to >= words.length) return;
    [words[at], words[to]] = [words[to], words[at]];
    element("passes").value = words.join(" ");
    this.edited();
  }

  edited() {
    const lines = [...this.lines];
    lines[this.first + this.rank] = `${this.rank}: ${element("passes").value.replace(/\s+/g, " ").trim()}`;
    this.onEdit(`${lines.join("\n")}\n`);
  }
}
