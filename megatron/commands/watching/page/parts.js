// The parts of the page below the charts: tables, bars by rank, and the loads of experts.

import { FORMS, duration, whole } from "./forms.js";
import { element, made, percent, prepared, short, svg, table, theme, time } from "./words.js";

const BAR_HEIGHT = 130;

const text = (value, tell) => value === null || value === undefined ? "" : tell(value);
const date = (seconds) => text(seconds, (value) => new Date(1000 * value).toLocaleString("en-GB"));

/** The figures of one run in large type; of several runs the table has them. */
export function drawFigures(runs) {
  const own = runs.length === 1 ? runs[0] : null;
  const figures = own ? [
    ["iteration", progress(own)], ["loss", text(own.newest.lm_loss, short)],
    ...Object.entries(own.evaluations).map(([name, { lm_loss }]) => [`${name} loss`, text(lm_loss, short)]),
    ["an iteration", text(own.usual.seconds_per_iteration, FORMS.seconds.tell)], ["tokens/s", text(own.newest.tokens_per_second, whole)],
    ["MFU", text(own.newest.mfu, percent)], ["idle", text(own.newest.idle, percent)],
    ["time left", left(own)]] : [];
  element("figures").replaceChildren(...figures.filter(([, value]) => value).map(([name, value]) =>
    made("div", {}, made("dt", { textContent: name }), made("dd", { textContent: value }))));
}

const progress = ({ iteration, facts }) => `${whole(iteration)}${text(facts.train_iters, (all) => ` of ${whole(all)}`)}`;

/** The time to the last iteration at the usual speed, without saves and evaluations. */
function left({ iteration, facts, usual: { seconds_per_iteration: usual }, has_ended: ended }) {
  const missing = (facts.train_iters ?? 0) - iteration;
  return missing > 0 && usual !== null && !ended ? duration(missing * usual) : "";
}

export const stateOf = (run, made) => run.has_ended ? "ended in good order" : run.latest === null ? "" : `last record ${duration(made - run.latest)} before this page`;

/** Rows of figures, a column for each run. */
export function drawNewest(runs, madeAt) {
  const sets = [...new Set(runs.flatMap((run) => Object.keys(run.evaluations)))];
  const newest = (name, tell) => (run) => text(run.newest[name], tell);
  const rows = [
    ["iteration", progress], ["state", (run) => stateOf(run, madeAt)], ["newest record", (run) => date(run.latest)],
    ["ranks", ({ facts }) => [text(facts.world_size, whole), ...Object.entries(facts.layout ?? {}).map(([kind, size]) => `${kind} ${size}`)].filter(Boolean).join(", ")],
    ["schedule, vocabulary", ({ facts }) => [facts.pipeline_schedule, facts.vocab_parallel].filter(Boolean).join(", ")],
    ["parameters", ({ facts }) => text(facts.parameters, whole)],
    ["loss, nats per token", newest("lm_loss", short)],
    ...sets.map((name) => [`${name} loss`, ({ evaluations }) => text(evaluations[name], ({ lm_loss, iteration }) => `${text(lm_loss, short)} (iteration ${whole(iteration)})`)]),
    ["learning rate", newest("learning_rate", short)], ["gradient norm", newest("grad_norm", short)],
    ["s an iteration", newest("seconds_per_iteration", short)], ["the same, median of 100 records", (run) => text(run.usual.seconds_per_iteration, short)],
    ["tokens/s", newest("tokens_per_second", whole)], ["TFLOP/s of a rank", newest("tflops_per_rank", short)], ["MFU", newest("mfu", percent)],
    ["idle, mean of the ranks", newest("idle", percent)],
    ["idle, least to most", ({ newest: own }) => text(own["idle min"], (least) => `${percent(least)} to ${percent(own["idle max"])}`)],
    ["rank that idles least", ({ busiest }) => text(busiest, ({ rank, share }) => `${rank} (in ${percent(share)} of the records)`)],
    ["peak memory, fullest rank", newest("peak_memory max", FORMS.bytes.tell)], ["loss scale", newest("loss_scale", short)],
    ["iterations without a step", ({ totals }) => totals.skipped ? `${whole(totals.skipped)}, of which ${whole(totals.nans)} with a loss that is not finite` : "0"],
    ["restarts", (run) => String(Math.max(0, run.starts - 1))],
    ["in saves, since the last start", newest("seconds_in_saves", duration)], ["in evaluations, since the last start", newest("seconds_in_evaluations", duration)],
    ["busiest expert, times the mean", newest("expert_imbalance", short)], ["tokens", newest("consumed_tokens", whole)], ["time left", left],
  ];
  const filled = rows.map(([name, tell]) => [name, ...runs.map(tell)]).filter(([, ...cells]) => cells.some(Boolean));
  fill("newest", table(["", ...runs.map((run) => run.title)], filled));
}

/** The figures of --plan beside those of the runs with as many ranks, and the idle share that a run's own plan has. */
export function drawPromised(promise, runs) {
  const own = promise ? runs.filter((run) => run.facts.world_size === promise.ranks) : [];
  const planned = runs.filter((run) => typeof run.facts.planned_idle === "number" && run.usual.idle !== null);
  element("promised").hidden = !promise && !planned.length;
  const measured = "Measured: medians of the last 100 records; memory of the newest one.";
  element("promised-hint").textContent = promise && !own.length ? `${promise.name} is for ${whole(promise.ranks)} ranks; no run that is shown has as many.`
    : promise ? `${promise.name}: ${promise.schedule}, ${whole(promise.ranks)} ranks. ${measured} In parentheses: measured over promised.` : measured;
  const shown = own.length ? own : planned;
  const names = {
    seconds: ["s an iteration", short, (run) => run.usual.seconds_per_iteration], tokens_per_second: ["tokens/s", whole, (run) => run.usual.tokens_per_second],
    mfu: ["MFU", percent, (run) => run.usual.mfu], idle: ["idle", percent, (run) => run.usual.idle],
    bytes: ["peak memory, fullest rank", FORMS.bytes.tell, (run) => run.newest["peak_memory max"]],
  };
  const rows = Object.entries(names).filter(([name]) => promise && name in promise.figures).map(([name, [words, tell, of]]) =>
    [words, tell(promise.figures[name]), ...shown.map((run) => text(of(run), (value) => `${tell(value)} (${short(value / promise.figures[name])})`))]);
  const plans = planned.length ? [["idle by the run's own plan", "", ...shown.map((run) => text(run.facts.planned_idle, (share) => `${percent(share)}; measured ${text(run.usual.idle, percent)}`))]] : [];
  const reasons = Object.entries(promise?.reasons ?? {}).map(([name, seconds]) => [`seconds of ${name}`, `${short(seconds)}, ${percent(seconds / promise.figures.seconds)}`, ...shown.map(() => "")]);
  fill("promised-table", table(["", promise ? "promised" : "", ...shown.map((run) => run.title)], [...rows, ...plans, ...reasons]));
}

export function drawRestarts(runs) {
  const rows = runs.flatMap((run) => run.restarts.map(({ iteration, reached, hours }) =>
    [run.title, whole(iteration), whole(reached), whole(Math.max(0, reached - iteration)), text(hours, (own) => duration(3600 * own))]));
  element("restarts").hidden = !rows.length;
  fill("restarts-table", table(["run", "went on from iteration", "had reached", "iterations repeated", "after"], rows));
}

export function drawSlow(runs) {
  const rows = runs.flatMap((run) => run.slow.slowest.map(({ iteration, seconds }) => [run.title, whole(iteration), time(seconds, true)]));
  element("slow").hidden = !rows.length;
  if (!rows.length) return;
  const counts = runs.map((run) => `${run.title}: ${whole(run.slow.count)} of ${whole(run.intervals)}`).join("; ");
  element("slow-hint").textContent = `Records whose iterations took more than ${runs[0].slow.times} times the median: ${counts}. The slowest:`;
  fill("slow-table", table(["run", "record of iteration", "an iteration"], rows));
}

/** The texts that the models have written: those of the greatest iteration first, whatever their run. */
export function drawTexts(runs) {
  const written = runs.flatMap((run) => run.written.map((own) => ({ ...own, title: run.title })));
  const rows = written.sort((one, other) => other.iteration - one.iteration).flatMap(({ iteration, title, texts }) =>
    texts.map(({ prompt, text: own }) => [whole(iteration), title, prompt || "(behind the end of a document)", own]));
  element("texts").hidden = !rows.length;
  const content = table(["iteration", "run", "prompt", "text"], rows);
  content.querySelectorAll("td:nth-child(n+3)").forEach((cell) => { cell.className = "passage"; });
  fill("texts-table", content);
}

/** The ranks that are slowest most often, for every run. */
export function drawSlowest(runs) {
  const letters = { pipeline: "pp", tensor: "tp", context: "cp", data: "dp" };
  const rows = runs.flatMap((run) => run.slowest.map(({ rank, share, slowness, place, passes }) =>
    [run.title, whole(rank), Object.entries(place ?? {}).map(([axis, at]) => `${letters[axis]} ${at}`).join(", "), percent(share), short(slowness), passes ?? ""]));
  element("slowest").hidden = !rows.length;
  fill("slowest-table", table(["run", "rank", "place", "slowest in", "times the usual, median", "most in passes"], rows));
}

/** Bars of memory, idle time and slowness by rank, for every run. */
export function drawRanks(runs) {
  const own = runs.filter((run) => run.ranks.length);
  element("ranks").hidden = !own.length;
  const charts = own.flatMap((run) => [
    bars(run, "Peak memory", "peak_memory", (value) => FORMS.bytes.tell(value)), bars(run, "Idle", "least_idle", percent), bars(run, "Computing, times the usual", "slowness", short)]);
  element("ranks-body").replaceChildren(...charts.filter(Boolean));
}

function bars(run, title, field, tell) {
  const known = run.ranks.filter((rank) => rank[field] !== null);
  if (!known.length) return null;
  const most = Math.max(...known.map((rank) => rank[field])) || 1;
  const least = Math.min(...known.map((rank) => rank[field]));
  const size = 100 / run.ranks.length;
  const nodes = run.ranks.map((rank, index) => {
    if (rank[field] === null) return "";
    const height = rank[field] / most * BAR_HEIGHT, name = rank.first === rank.last ? `rank ${rank.first}` : `ranks ${rank.first} to ${rank.last}`;
    const marked = field === "least_idle" ? rank[field] === least && least < most : rank[field] === most && least < most;
    const wide = Math.min(0.8 * size, 8);
    const bar = svg("rect", { class: `bar ${marked ? "least" : ""}`, x: `${size * (index + 0.5) - wide / 2}%`, width: `${wide}%`, y: 20 + BAR_HEIGHT - height, height });
    bar.append(Object.assign(svg("title", {}), { textContent: `${name}: ${tell(rank[field])}${Object.entries(rank.reasons).map(([reason, share]) => `; ${reason} ${percent(share)}`).join("")}` }));
    return bar;
  }).filter(Boolean);
  const last = run.ranks.at(-1).last;
  const words = (value, properties) => Object.assign(svg("text", properties), { textContent: value });
  const picture = svg("svg", { width: "100%", height: BAR_HEIGHT + 40, role: "img", "aria-label": `${title} by rank of ${run.title}: ${tell(least)} to ${tell(most)}` },
    words(`${title}: ${tell(least)} to ${tell(most)}`, { x: 0, y: 12 }), ...nodes,
    words("rank 0", { x: `${size > 15 ? size / 2 : 0}%`, y: BAR_HEIGHT + 36, class: size > 15 ? "middle" : "" }), words(last ? `rank ${last}` : "", { x: `${size > 15 ? 100 - size / 2 : 100}%`, y: BAR_HEIGHT + 36, class: size > 15 ? "middle" : "end" }));
  const rows = known.map((rank) => [rank.first === rank.last ? `${rank.first}` : `${rank.first} to ${rank.last}`, tell(rank[field])]);
  return made("div", {}, made("h2", { textContent: run.title }), made("div", { className: "plot" }, picture),
    made("details", {}, made("summary", { textContent: "As a table" }), made("div", { className: "scroll" }, table(["rank", title.toLowerCase()], rows))));
}

/** A field for each expert of each layer, in the colour of its load. */
export function drawExperts(runs) {
  const own = runs.filter((run) => run.layers.length);
  element("experts").hidden = !own.length;
  element("experts-body").replaceChildren(...own.map(loads));
}

function loads(run) {
  const columns = Math.max(...run.layers.map((layer) => layer.loads.length));
  const canvas = made("canvas", { className: "loads", tabIndex: 0 }), told = made("p", { className: "details" });
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", `Loads of ${columns} experts in ${run.layers.length} layers of ${run.title}; the arrow keys move between them`);
  told.setAttribute("aria-live", "polite");
  const height = Math.max(5, Math.min(24, 480 / run.layers.length));
  let at = [0, 0];
  const draw = () => {
    const width = canvas.clientWidth, context = prepared(canvas, width, height * run.layers.length);
    context.fillStyle = theme().accent;
    run.layers.forEach(({ loads: shares }, row) => shares.forEach((share, index) => {
      context.globalAlpha = Math.min(1, share / 2);
      context.fillRect(index * width / columns, row * height, Math.max(1, width / columns - 1), height - 1);
    }));
  };
  const tell = (row, column) => {
    at = [Math.max(0, Math.min(run.layers.length - 1, row)), Math.max(0, Math.min(columns - 1, column))];
    const { layer, loads: shares } = run.layers[at[0]];
    told.textContent = shares[at[1]] === undefined ? "" : `layer ${layer}, expert ${at[1]}: ${short(shares[at[1]])} times the mean`;
  };
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => tell(Math.floor(offsetY / height), Math.floor(offsetX / canvas.clientWidth * columns)));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (move) { event.preventDefault(); tell(at[0] + move[0], at[1] + move[1]); }
  });
  new ResizeObserver(draw).observe(canvas);
  return made("div", {}, made("h2", { textContent: run.title }), canvas, told);
}

/** Puts a table in its place, unless it stands there already: a reader may have marked some of it. */
function fill(id, content) {
  content.querySelectorAll("tbody td:first-child").forEach((cell) => {
    cell.replaceWith(Object.assign(made("th", { textContent: cell.textContent }), { scope: "row" }));
  });
  if (element(id).innerHTML !== content.outerHTML) element(id).replaceChildren(content);
}
