// The page: asks for the values of what is seen, and shows them in all its parts.

import { ChartView } from "./chart.js";
import { openFeed } from "./feed.js";
import { AXES, whole } from "./forms.js";
import { drawExperts, drawFigures, drawNewest, drawPromised, drawRanks, drawRestarts, drawSlow, drawSlowest, drawTexts, stateOf } from "./parts.js";
import { debounced, element, made, percent } from "./words.js";

const PAUSE = 2000; // milliseconds at least between two questions for new values
const SHOWN_FIRST = 8; // runs of a page that are shown before the reader chooses

const feed = openFeed();
const page = { axis: "iteration", range: null, log: false, hidden: null, values: null, charts: new Map(), asked: 0, failed: "" };

readAddress();
listen();
await refresh();
if (feed.isLive) follow(PAUSE);

/** Asks for new values, again and again. A server that takes long to answer is asked less often. */
function follow(pause) {
  setTimeout(async () => {
    const begun = performance.now();
    if (!document.hidden) await refresh(page.values?.version ?? null);
    follow(Math.max(PAUSE, 10 * (performance.now() - begun)));
  }, pause);
}

/** Asks for the values of what is seen; `seen` is the version that the page has, if nothing else changes. */
async function refresh(seen = null) {
  const asked = ++page.asked;
  try {
    const found = await feed.values({ axis: page.axis, range: page.range, points: 2000 }, seen);
    if (asked !== page.asked) return;
    page.failed = "";
    if (found.runs) page.values = found;
    if (found.runs) render();
  } catch (error) {
    if (asked === page.asked) page.failed = `${error.message}: is watch-run still running?`;
  }
  tellState();
  document.body.dataset.state = "done";
}

/** The runs, each with its title, its colour and its place in the order. */
function allRuns() {
  const { runs } = page.values;
  const names = runs.map((run) => run.name);
  return runs.map((run, index) => ({
    ...run, index, colour: `var(--c${index % 8})`, id: `${run.name}\n${run.key}`,
    title: names.filter((name) => name === run.name).length > 1 ? `${run.name}, ${run.key}` : run.name,
  }));
}

function render() {
  const all = allRuns();
  page.hidden ??= new Set(all.slice(0, Math.max(0, all.length - SHOWN_FIRST)).map((run) => run.id));
  const runs = all.filter((run) => !page.hidden.has(run.id));
  element("title").textContent = document.title = all.length === 1 ? `Training run ${all[0].title}` : "Training runs";
  element("notes").replaceChildren(...page.values.notes.map((note) => made("li", { textContent: note })));
  drawRuns(all);
  drawCharts(runs);
  drawFigures(runs);
  drawNewest(runs, page.values.made);
  drawPromised(page.values.promise, runs);
  drawTexts(runs);
  drawRanks(runs);
  drawSlowest(runs);
  drawExperts(runs);
  drawRestarts(runs);
  drawSlow(runs);
}

function drawRuns(all) {
  const key = JSON.stringify(all.map((run) => [run.id, run.title]));
  if (element("runs").dataset.key !== key) {
    element("runs").dataset.key = key;
    element("runs").replaceChildren(...all.map((run) => {
      const box = made("input", { type: "checkbox", checked: !page.hidden.has(run.id) });
      box.addEventListener("change", () => { page.hidden[box.checked ? "delete" : "add"](run.id); render(); });
      const swatch = made("span", { className: "sample" });
      swatch.style.borderColor = run.colour;
      return made("li", {}, made("label", {}, box, swatch, run.title, made("span", { className: "about" })));
    }));
  }
  element("runs").querySelectorAll(".about").forEach((node, index) => { node.textContent = aboutRun(all[index]); });
}

function aboutRun(run) {
  return [`iteration ${whole(run.iteration)}`, feed.isLive ? stateOf(run, page.values.made).replace(" before this page", " ago") : run.has_ended ? "ended in good order" : ""].filter(Boolean).join(", ");
}

function drawCharts(runs) {
  const range = page.range ?? page.values.ranges[page.axis];
  for (const chart of page.values.charts) {
    if (!page.charts.has(chart.name)) page.charts.set(chart.name, new ChartView(chart, { range: zoomTo, zoom: zoomBy, cursor: pointAll }));
  }
  const views = page.values.charts.map((chart) => page.charts.get(chart.name));
  const nodes = views.map((view) => view.node), host = element("charts");
  if (nodes.length !== host.children.length || nodes.some((node, index) => node !== host.children[index])) host.replaceChildren(...nodes);
  for (const [index, chart] of page.values.charts.entries()) {
    const promise = promiseOf(chart, runs);
    views[index].show(chart, runs, { axis: page.axis, range, log: page.log, promise });
  }
  element("range").textContent = page.range ? page.range.map((place) => AXES[page.axis].tell(place)).join(" to ") : "";
}

/** The value that a plan promises for a chart, or null: --plan for runs with as many ranks, or the own plan of the only run. */
function promiseOf({ promise }, runs) {
  const plan = page.values.promise;
  if (plan && promise in plan.figures && runs.some((run) => run.facts.world_size === plan.ranks)) return plan.figures[promise];
  return promise === "idle" && runs.length === 1 ? runs[0].facts.planned_idle ?? null : null;
}

/** Marks a place in all charts, and writes the values beside it in one of them. */
function pointAll(place, from) {
  for (const view of page.charts.values()) view.point(place, view === from);
}

function zoomTo(from, to) {
  page.range = from === null ? null : [from, to];
  writeAddress();
  render();
  if (feed.isLive) refresh();
}

/** Shows a range that is so many times as long, around a place or around its middle. */
function zoomBy(factor, around = null) {
  if (!page.values) return;
  const [from, to] = page.range ?? page.values.ranges[page.axis];
  const place = around ?? (from + to) / 2;
  const [left, right] = [place - (place - from) * factor, place + (to - place) * factor];
  if (factor > 1 && page.range === null) return;
  zoomTo(Math.max(0, left), right);
}

function tellState() {
  const { values, failed } = page;
  element("error").hidden = !failed;
  element("error").textContent = failed;
  if (!values) return;
  const records = `${whole(values.records)} records`;
  const reading = values.glanced ? `reading the records: ${percent(values.read)} done; until then some of them stand for all` : records;
  element("status").textContent = feed.isLive ? `Live: ${reading}.` : `${records}, as of ${new Date(1000 * values.made).toLocaleString("en-GB")}.`;
  element("kept").textContent = feed.isLive ? "Zooming in shows every record." : "This file has at most 2,000 points of each curve, the least and the greatest among them; watch-run serves all.";
  document.body.dataset.records = values.records;
}

function listen() {
  for (const radio of document.querySelectorAll("input[name=axis]")) {
    radio.addEventListener("change", () => { Object.assign(page, { axis: radio.value, range: null }); changed(); });
  }
  element("log").addEventListener("change", () => { page.log = element("log").checked; writeAddress(); render(); });
  element("zoom-in").addEventListener("click", () => zoomBy(0.5));
  element("zoom-out").addEventListener("click", () => zoomBy(2));
  element("zoom-fit").addEventListener("click", () => zoomTo(null));
  element("theme").addEventListener("click", turnTheme);
  const redraw = debounced(() => { if (page.values) render(); }, 100);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  window.addEventListener("hashchange", () => { readAddress(); refresh(); });
}

function changed() {
  writeAddress();
  refresh();
}

function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const ends = ["from", "to"].map((name) => Number(words.get(name) ?? NaN));
  page.axis = words.get("axis") in AXES ? words.get("axis") : "iteration";
  page.range = ends[0] < ends[1] ? ends : null;
  page.log = words.get("log") === "1";
  element("log").checked = page.log;
  for (const radio of document.querySelectorAll("input[name=axis]")) radio.checked = radio.value === page.axis;
}

function writeAddress() {
  const words = new URLSearchParams();
  if (page.axis !== "iteration") words.set("axis", page.axis);
  if (page.range) { words.set("from", page.range[0]); words.set("to", page.range[1]); }
  if (page.log) words.set("log", "1");
  history.replaceState(null, "", `#${words}`);
}

function turnTheme() {
  const order = [undefined, "dark", "light"], root = document.documentElement;
  const next = order[(order.indexOf(root.dataset.theme) + 1) % 3];
  if (next) root.dataset.theme = next; else delete root.dataset.theme;
  render();
}
