// What is seen, as the part of the address after #: a link reproduces it.
//
// Only what differs from the first view is written. The text of an edited plan is compressed.

export const FIRST = {
  schedule: "1f1b", vocab: "vocab-2", p: 4, m: 8, v: null, n: null, limit: null, split: false, joined: false, ahead: null,
  searched: true, seconds: null, output: 1.2, again: false, plan: null, model: null, replicas: null,
  costs: "F=1,B=1,W=1,IF=0.05,IB=0.05,p2p=0.05,C0=0.1,C1=0.2,C2=0.15,C3=0.15,CIF=0.1,CIB=0.1",
  waits: "",
};

const NUMBERS = new Set(["p", "m", "v", "n", "limit", "ahead", "seconds", "output"]);
const WORDS = new Set(["schedule", "vocab", "costs", "waits"]);
const PARTS = new Set(["model", "replicas"]); // of a case: objects with values of their own
const PART_WORDS = new Set(["gpu", "kind"]), PART_FLAGS = new Set(["recompute", "overlap_reduce", "sharded", "overlap_gather"]);

/** The fragment of a case and of what else is seen: `view` has short texts by name. */
export async function fragmentOf(shown, view) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(shown)) {
    if (value === FIRST[name] || PARTS.has(name) || name === "plan") continue;
    words.set(name, value === null ? "" : String(value));
  }
  for (const part of PARTS) {
    for (const [name, value] of Object.entries(shown[part] ?? {})) words.set(`${part}.${name}`, String(value));
  }
  if (shown.plan !== null) words.set("plan", await packed(shown.plan));
  for (const [name, value] of Object.entries(view)) if (value) words.set(`view.${name}`, value);
  return words.toString().replaceAll("%3A", ":").replaceAll("%2C", ",").replaceAll("%3D", "=");
}

/** The case and the view of a fragment; what it leaves out is as in the first view. */
export async function readFragment(fragment) {
  const shown = { ...FIRST }, view = {};
  for (const [name, text] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    const [part, own] = name.split(".");
    if (part === "view") view[own] = text;
    else if (PARTS.has(part)) shown[part] = { ...shown[part], [own]: partValue(own, text) };
    else if (name === "plan") shown.plan = await unpacked(text);
    else if (name in FIRST) shown[name] = valueOf(name, text);
  }
  return { shown, view };
}

function valueOf(name, text) {
  if (WORDS.has(name)) return text;
  if (NUMBERS.has(name)) return text === "" ? null : Number(text);
  return text === "true";
}

function partValue(name, text) {
  if (PART_WORDS.has(name)) return text;
  return PART_FLAGS.has(name) ? text === "true" : Number(text);
}

async function packed(text) {
  const bytes = await through(new Blob([text]), new CompressionStream("deflate-raw"));
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

async function unpacked(text) {
  try {
    const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(binary, (letter) => letter.charCodeAt(0));
    return new TextDecoder().decode(await through(new Blob([bytes]), new DecompressionStream("deflate-raw")));
  } catch {
    return "# the link was cut short: this plan cannot be read";
  }
}

async function through(blob, stream) {
  return new Uint8Array(await new Response(blob.stream().pipeThrough(stream)).arrayBuffer());
}
