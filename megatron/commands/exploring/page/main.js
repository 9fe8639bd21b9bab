// The page: asks Python about what the form says, and shows the answer in all its parts.

import { Comparison } from "./compare.js";
import { Controls } from "./controls.js";
import { Editor } from "./editor.js";
import { Superseded, openEngine } from "./engine.js";
import { MemoryView } from "./memory.js";
import { Needs, inWords } from "./needs.js";
import { Recorded } from "./recorded.js";
import { FIRST, fragmentOf, readFragment } from "./state.js";
import { TimelineView } from "./timeline.js";
import { Ways } from "./ways.js";
import { copy, debounced, element, gibibytes, made, passName, percent, save, short, time } from "./words.js";

const LARGE = 600; // microbatches x slices x chunks x ranks from which the block's order is shown first

const channel = await openEngine();
const page = {
  shown: FIRST, view: {}, result: null, asked: 0,
  main: channel("shown", (progress) => status(progress || "Planning")),
};

const plan = new TimelineView(element("plan"), { onFocus: tellPass, onView: seen });
const memory = new MemoryView(element("memory"), plan);
const comparison = new Comparison(channel("compared"), ({ schedule, vocab }) => change({
  schedule, vocab, v: null, plan: null, split: false, searched: true,
  limit: page.facts.schedules[schedule].needs_limit ? page.shown.limit : null,
}));
const editor = new Editor((text) => { page.shown = { ...page.shown, plan: text }; refreshSoon(); });
const recorded = new Recorded(plan, () => page.idle, (text) => page.main.ask({ action: "recorded", text, case: page.shown }));
const refreshSoon = debounced(refresh, 200);

try {
  page.facts = await page.main.ask({ action: "facts" });
} catch (error) {
  fault(error.message);
  throw error;
}
if (page.facts.ways) page.ways = new Ways(channel("ways"), page.facts, drawLegend);
const controls = new Controls(page.facts, () => { page.shown = controls.read(); refreshSoon(); });
listen();
await follow();

/** Shows what the address says. */
async function follow() {
  const { shown, view } = await readFragment(location.hash);
  Object.assign(page, { shown, view });
  plan.part();
  Object.assign(plan, { from: 0, to: 1, chosen: null });
  controls.write(shown);
  element("all-treatments").checked = view.all === "1";
  await refresh();
}

function change(differences) {
  page.shown = { ...page.shown, ...differences };
  controls.write(page.shown);
  refresh();
}

/** Asks anew. Whoever asks for something else waits for `page.idle`, so as not to end a search. */
function refresh() {
  page.idle = answerAnew();
  return page.idle;
}

async function answerAnew() {
  const asked = ++page.asked, shown = page.shown, begun = performance.now();
  const current = () => asked === page.asked;
  status("Planning");
  document.body.dataset.state = "busy";
  try {
    if (isLarge(shown) && shown.searched && !shown.plan && page.facts.schedules[shown.schedule]?.has_block) {
      const first = await page.main.ask({ action: "simulate", case: { ...shown, searched: false, joined: false } });
      if (!current()) return;
      render(first, shown);
      document.body.dataset.firstMs = Math.round(performance.now() - begun);
      status("Searching: the plan in the order of the building block is shown meanwhile");
    }
    const found = await page.main.ask({ action: "simulate", case: shown });
    if (!current()) return;
    render(found, shown);
    document.body.dataset.drawnMs = Math.round(performance.now() - begun);
    status(found.cut ? `The search was ended after ${shown.seconds} s: a better plan may exist.` : "");
    for (const note of found.notes) status(note);
    await recorded.update(page.facts);
    if (current()) comparison.show(shown, page.facts, page.view.compare === "1");
  } catch (error) {
    if (error instanceof Superseded || !current()) return;
    fault(error.message);
  } finally {
    if (current()) document.body.dataset.state = "done";
  }
}

function isLarge({ schedule, p, m, v, n }) {
  return p * m * (n ?? 1) * (v ?? page.facts.schedules[schedule]?.chunks ?? 1) > LARGE;
}

function render(found, shown) {
  page.result = found;
  fault("");
  const inSeconds = found.forecast !== null;
  const needs = new Needs(found.needs);
  const [from, to] = (page.view.see ?? "0~1").split("~").map(Number);
  if (page.view.see) Object.assign(plan, { from: Math.min(from || 0, 1 - 1e-4), to: Math.min(to || 1, 1) });
  plan.show(found.drawing, page.facts, needs, inSeconds);
  delete page.view.see;
  element("plan").setAttribute("aria-label", `Plan: ${found.heading}`);
  memory.show(found.memory, inSeconds, found.forecast?.usable ?? null);
  drawFigures(found, inSeconds);
  drawLegend(found.drawing);
  editor.show(found.plan, shown.plan !== null);
  if (page.view.pass) {
    const [rank, kind, microbatch, chunk, slice = 0] = page.view.pass.split("~");
    plan.chooseNamed(Number(rank), kind, Number(microbatch), Number(chunk), Number(slice));
    delete page.view.pass;
  }
  element("command").textContent = found.command;
  element("save-costs").hidden = found.costs_file === null;
  writeAddress();
}

function drawFigures({ figures, forecast }, inSeconds) {
  const { definitions } = page.facts;
  const held = figures.peak_bytes ? Math.max(...figures.peak_bytes) : null;
  const cells = [
    ["iteration_time", "time", time(figures.iteration_time, inSeconds), figures.iteration_time, definitions.time],
    ["idle", "idle", percent(figures.idle), figures.idle, definitions.idle],
    ["bubble_rate", "bubble", percent(figures.bubble_rate), figures.bubble_rate, definitions.bubble],
    ["peak_in_flight", "in flight", short(Math.max(...figures.peak_in_flight)), figures.peak_in_flight, definitions["in flight"]],
  ];
  if (forecast) cells.push(
    ["peak_bytes", held <= forecast.usable ? "memory" : "memory: does not fit", gibibytes(held), figures.peak_bytes, `the most that a rank holds; tensors can use ${gibibytes(forecast.usable)}`],
    ["seconds", "with optimizer", time(forecast.seconds, true), forecast.seconds, "time of an iteration with the optimizer's step"],
    ["mfu", "MFU", percent(forecast.mfu), forecast.mfu, "model FLOPs / (p x the data sheet's rate x the time with the optimizer's step); the rates are those that Megatron-LM's kernels attain on A100s, scaled"],
  );
  for (const [kind, share] of Object.entries(figures.hidden)) {
    cells.push([`hidden_${kind}`, `${kind} hidden`, percent(share), share, `share of ${kind} (${page.facts.meanings[kind]}) that adds nothing to the iteration`]);
  }
  element("figures").replaceChildren(...cells.map(([name, words, text, value, title]) => {
    const number = made("dd", { textContent: text });
    Object.assign(number.dataset, { name, value: JSON.stringify(value) });
    return made("div", { title, className: words.includes("not fit") ? "warn" : "" }, made("dt", { textContent: words }), number);
  }));
  document.body.dataset.rows = JSON.stringify(figures.rows.length);
}

function drawLegend({ ranks }, id = "legend") {
  const { passes, comms, colours, meanings } = page.facts;
  const drawn = new Set(ranks.flatMap((row) => [...row.passes, ...row.comms].map(([kind]) => kind)));
  const paired = ranks.some((row) => row.passes.some((pass) => pass[6]));
  const chunked = ranks.some((row) => row.passes.some(([, , chunk]) => chunk));
  element(id).replaceChildren(...[...passes, ...comms].filter((kind) => drawn.has(kind)).map((kind) => {
    const swatch = made("span", { className: comms.includes(kind) ? "swatch thin" : "swatch" });
    swatch.style.background = colours[kind];
    return made("li", {}, swatch, `${kind} ${meanings[kind]}`);
  }), ...(chunked ? [made("li", { textContent: "paler: later chunks of a rank" })] : []), ...(paired ? [made("li", { textContent: "bar above: a pair, which runs together" })] : []));
}

function tellPass(pass, isChosen) {
  const chosen = isChosen ? pass : plan.chosen;
  editor.choose(chosen?.kind === "U" ? null : chosen);
  const { needs, inSeconds } = plan;
  const words = (own) => own.kind === "U" ? "" : ` Waits for ${inWords(needs.before(own), own.microbatch)}. Waited for by ${inWords(needs.after(own), own.microbatch)}.`;
  element("pass-details").textContent = pass
    ? `${passName(pass.kind, pass.microbatch, pass.chunk, pass.slice)} on rank ${pass.rank}, ${page.facts.meanings[pass.kind]}: ${time(pass.start, inSeconds)} to ${time(pass.end, inSeconds)}.${besides(pass)}${words(pass)}`
    : "";
  writeSoon();
}

/** What the pair of a pass means for it. */
function besides({ beside }) {
  return beside ? ` In a pair with ${beside}: both begin when both have what they wait for, and other ranks get the results when both have ended.` : "";
}

function seen() {
  memory.draw();
  writeSoon();
}

async function writeAddress() {
  const view = {
    see: plan.isPart ? plan.times.map((at) => Number((at / plan.drawing.end).toFixed(5))).join("~") : "",
    pass: plan.chosen ? [plan.chosen.rank, plan.chosen.kind, plan.chosen.microbatch, plan.chosen.chunk, plan.chosen.slice].join("~") : "",
    all: element("all-treatments").checked ? "1" : "",
    compare: page.view.compare ?? "",
  };
  page.fragment = await fragmentOf(page.shown, view);
  history.replaceState(null, "", page.fragment ? `#${page.fragment}` : location.pathname + location.search);
}

function writeSoon() {
  clearTimeout(page.timer);
  page.timer = setTimeout(writeAddress, 300);
}

function status(text) { element("status").textContent = text; }

function fault(message) {
  const edited = page.shown.plan !== null && page.result !== null;
  element("error").textContent = edited ? "" : message;
  element("error").hidden = edited || !message;
  editor.fault(edited ? message : "");
  if (message) status(edited ? "The edited plan cannot be run: the last one that can is shown." : "");
}

function listen() {
  addEventListener("hashchange", () => { if (location.hash.slice(1) !== page.fragment) follow(); });
  element("zoom-in").addEventListener("click", () => plan.zoom(0.5));
  element("zoom-out").addEventListener("click", () => plan.zoom(2));
  element("zoom-fit").addEventListener("click", () => plan.see(0, 1));
  for (const [id, kind] of [["compare", "click"], ["all-treatments", "change"]]) {
    element(id).addEventListener(kind, () => {
      page.view.compare = "1";
      comparison.show(page.shown, page.facts, true);
      writeSoon();
    });
  }
  element("share").addEventListener("click", async (event) => { await writeAddress(); copy(event.target, location.href); });
  element("copy-command").addEventListener("click", (event) => copy(event.target, page.result.command));
  element("save-plan").addEventListener("click", () => save("my.plan", page.result.plan));
  element("save-costs").addEventListener("click", () => save("costs.json", JSON.stringify(page.result.costs_file, null, 1), "application/json"));
  element("save-svg").addEventListener("click", saveSvg);
  element("theme").addEventListener("click", turnTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

async function saveSvg() {
  await page.idle;
  const window = plan.isPart ? plan.times.join(":") : "";
  try {
    save(`${page.shown.schedule}_${page.shown.vocab}.svg`, (await page.main.ask({ action: "draw", case: page.shown, window })).svg, "image/svg+xml");
  } catch (error) {
    if (!(error instanceof Superseded)) fault(error.message);
  }
}

/** As the system has it, light, dark, and around again. */
function turnTheme() {
  const root = document.documentElement, order = [undefined, "light", "dark"];
  const next = order[(order.indexOf(root.dataset.theme) + 1) % 3];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  redraw();
}

function redraw() {
  plan.draw();
  memory.draw();
  recorded.view.draw();
  page.ways?.view.draw();
}
