// The form: fields from the facts that Python tells, and a case from the fields.

import { element, made } from "./words.js";

const PASSES = { F: "F forward", B: "B backward", W: "W weights", R: "R again" };
const WAITS = ["F", "B", "W", "R"]; // passes of layers, which may have experts on other ranks
const INPUT = { IF: "IF", IB: "IB", E: "E" };
const SIZES = { layers: "layers", hidden: "hidden size", heads: "heads", groups: "key-value heads", ffn: "MLP width", seq: "sequence", vocabulary: "vocabulary", batch: "sequences", machine: "GPUs a machine" };
const EXCHANGE = { RG: 3, AG: 1.5, U: 0.2 }; // times to begin with
const REPLICA_FLAGS = ["overlap_reduce", "sharded", "overlap_gather"];
const SEARCH_SECONDS = 5; // that a search over all schedules begins with
const OPTIONAL = ["v", "n", "limit", "ahead", "seconds"];

export class Controls {
  /** `onChange()` is called when the reader has changed a field. */
  constructor(facts, onChange) {
    this.facts = facts;
    const option = (value, text = value) => new Option(text, value);
    element("schedule").append(...Object.keys(facts.schedules).map((name) => option(name)));
    element("vocab").append(...Object.keys(facts.treatments).map((name) => option(name)));
    element("gpu").append(...facts.gpus.map((name) => option(name)));
    element("preset").append(...Object.keys(facts.models).map((name) => option(name)), option("", "own sizes"));
    element("hand-passes").append(...Object.entries(PASSES).map(([kind, text]) => field(`cost-${kind}`, text)), field("output", "output layer"));
    element("hand-waits").append(...WAITS.map((kind) => field(`wait-${kind}`, `of ${kind}`)));
    element("hand-comms").append(...Object.entries(INPUT).map(([kind, text]) => field(`cost-${kind}`, text)), ...facts.comm_costs.map((kind) => field(`cost-${kind}`, kind)));
    element("hand-exchange").append(...Object.keys(EXCHANGE).map((kind) => field(`cost-${kind}`, kind)));
    for (const kind of Object.keys(EXCHANGE)) element(`cost-${kind}`).title = `${facts.meanings[kind]}: of all buckets of a rank together`;
    for (const kind of [...Object.keys(INPUT), ...facts.comm_costs]) {
      element(`cost-${kind}`).title = facts.meanings[kind] ?? "activation or gradient to the next stage";
    }
    element("output").title = "forward of the whole output layer; S and T have their times from it";
    element("model-sizes").append(...Object.entries(SIZES).map(([name, text]) => field(`model-${name}`, text, "number")));
    this.kinds = [...Object.keys(PASSES), ...Object.keys(INPUT), ...facts.comm_costs, ...Object.keys(EXCHANGE)];
    element("case").addEventListener("submit", (event) => event.preventDefault());
    element("case").addEventListener("input", (event) => {
      this.follow(event.target.id);
      onChange();
    });
  }

  /** Writes a case into the fields. */
  write(shown) {
    for (const name of ["schedule", "vocab", "p", "m", ...OPTIONAL, "output"]) element(name).value = shown[name] ?? "";
    for (const name of ["split", "joined"]) element(name).checked = shown[name];
    element("again").checked = shown.again;
    element("block").checked = !shown.searched;
    if (OPTIONAL.slice(2).some((name) => shown[name] !== null) || shown.split || shown.joined || !shown.searched) element("more").open = true;
    const [costs, waits] = [timesOf(shown.costs), timesOf(shown.waits)];
    for (const kind of WAITS) element(`wait-${kind}`).value = waits[kind] ?? "";
    if (shown.waits) element("waits").open = true;
    this.others = Object.entries(costs).filter(([kind]) => !this.kinds.includes(kind));
    for (const kind of this.kinds) element(`cost-${kind}`).value = costs[kind] ?? "";
    element(shown.model ? "by-model" : "by-hand").checked = true;
    const model = shown.model ?? { gpu: "H100", ...Object.values(this.facts.models)[0] };
    this.writeModel(model);
    element("gpu").value = model.gpu;
    element("recompute").checked = Boolean(model.recompute);
    element("replicas").value = shown.replicas?.count ?? 1;
    element("buckets").value = shown.replicas?.buckets ?? 1;
    for (const name of REPLICA_FLAGS) element(name).checked = Boolean(shown.replicas?.[name]);
    this.follow("");
  }

  writeModel(model) {
    this.kind = model.kind ?? "gpt";
    for (const name of Object.keys(SIZES)) element(`model-${name}`).value = model[name] ?? (name === "machine" ? 8 : 1);
    const same = Object.entries(this.facts.models).find(([, sizes]) =>
      sizes.kind === this.kind && Object.keys(SIZES).every((name) => ["batch", "machine"].includes(name) || String(sizes[name]) === element(`model-${name}`).value));
    element("preset").value = same?.[0] ?? "";
  }

  /** Lets fields follow one that has changed. */
  follow(changed) {
    if (changed === "preset" && element("preset").value) this.writeModel(this.facts.models[element("preset").value]);
    else if (changed.startsWith("model-")) element("preset").value = "";
    const schedule = this.facts.schedules[element("schedule").value];
    const v = element("v");
    v.disabled = !schedule.chunk_step;
    if (changed === "schedule") v.value = "";
    v.placeholder = schedule.chunks;
    v.min = schedule.chunks;
    v.step = schedule.chunk_step || 1;
    const limit = element("limit");
    if (schedule.needs_limit && !limit.value) limit.value = element("p").value;
    else if (changed === "schedule" && !schedule.needs_limit) limit.value = "";
    const seconds = element("seconds");
    if (changed === "schedule" && schedule.compares && !seconds.value) seconds.value = SEARCH_SECONDS;
    if (schedule.needs_limit || schedule.compares) element("more").open = true;
    element("block").disabled = !schedule.has_block;
    this.followReplicas(changed);
    element("schedule-hint").textContent = `${schedule.title}: ${schedule.description}`;
    element("joined").disabled = element("by-model").checked; // the models are dense: they exchange no tokens
    element("model").hidden = !element("by-model").checked;
    element("hand").hidden = element("by-model").checked;
    const barriers = this.facts.treatments[element("vocab").value].barriers;
    for (const kind of ["C1", "C2", "C3"]) element(`cost-${kind}`).disabled = !barriers.includes(kind);
  }

  /** Shows what several replicas do, with times to begin with where none are given. */
  followReplicas(changed) {
    const [several, sharded] = [Number(element("replicas").value) > 1, element("sharded").checked];
    element("exchange").hidden = element("buckets").disabled = !several;
    element("hand-exchange").hidden = element("by-model").checked;
    element("overlap_gather").disabled = element("cost-AG").disabled = element("cost-U").disabled = !sharded;
    if (!["replicas", "sharded"].includes(changed) || !several) return;
    for (const [kind, begin] of Object.entries(EXCHANGE)) {
      const own = element(`cost-${kind}`);
      if (!own.disabled && own.value === "") own.value = begin;
    }
  }

  /** The case that the fields say, without an edited plan. */
  read() {
    const text = (name) => element(name).value.trim();
    const number = (name) => (text(name) === "" ? null : Number(text(name)));
    const words = (times) => times.filter(([, value]) => value !== "").map((word) => word.join("=")).join(",");
    const [byHand, joinable] = [element("by-hand").checked, !element("joined").disabled];
    return {
      schedule: text("schedule"), vocab: text("vocab"), p: number("p") ?? 1, m: number("m") ?? 1,
      ...Object.fromEntries(OPTIONAL.map((name) => [name, number(name)])),
      split: element("split").checked, joined: joinable && element("joined").checked, searched: element("block").disabled || !element("block").checked,
      costs: words([...this.kinds.map((kind) => [kind, text(`cost-${kind}`)]), ...this.others]),
      waits: byHand ? words(WAITS.map((kind) => [kind, text(`wait-${kind}`)])) : "",
      output: number("output"), again: element("again").checked,
      model: element("by-model").checked ? this.readModel() : null, plan: null,
      replicas: number("replicas") > 1 ? this.readReplicas() : null,
    };
  }

  readReplicas() {
    const flags = REPLICA_FLAGS.map((name) => [name, element(name).checked && !element(name).disabled]);
    return { count: Number(element("replicas").value), buckets: Number(element("buckets").value) || 1, ...Object.fromEntries(flags) };
  }

  readModel() {
    const sizes = Object.keys(SIZES).map((name) => [name, Number(element(`model-${name}`).value)]);
    return { gpu: element("gpu").value, kind: this.kind, ...Object.fromEntries(sizes), recompute: element("recompute").checked };
  }
}

/** The times of a text such as F=1,B=2, by kind. */
function timesOf(text) {
  return Object.fromEntries(text.split(",").filter(Boolean).map((word) => word.split("=")));
}

function field(id, text, type = "text") {
  const input = made("input", { id, type });
  if (type === "text") input.inputMode = "decimal";
  return made("div", {}, made("label", { htmlFor: id, textContent: text }), input);
}
