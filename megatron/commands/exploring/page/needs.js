// What a pass waits for, and what waits for it. Python tells the needs of microbatch 0
// (megatron/schedules/needs.py); those of the others are alike.

import { passName } from "./words.js";

const key = ({ rank, kind, chunk, slice }) => `${rank} ${kind} ${chunk} ${slice}`;

export class Needs {
  /** `ranks`: for every rank, the needs of its passes of microbatch 0. */
  constructor(ranks) {
    this.of = new Map();
    this.users = new Map();
    ranks.forEach((passes, rank) => passes.forEach((item) => {
      const needed = [
        ...item.own.map(([kind, chunk, slice]) => ({ rank, kind, chunk, slice, by: null })),
        ...item.comms.flatMap((comm) => comm.from.map(([at, kind, chunk, slice]) => ({ rank: at, kind, chunk, slice, by: comm.kind }))),
      ];
      this.of.set(key({ rank, ...item }), needed);
      for (const need of needed) {
        const source = key(need);
        if (!this.users.has(source)) this.users.set(source, []);
        this.users.get(source).push({ rank, kind: item.kind, chunk: item.chunk, slice: item.slice, by: need.by });
      }
    }));
  }

  /** Passes of the same microbatch that a pass waits for: rank, kind, chunk, slice, and by which communication. */
  before(pass) {
    return this.of.get(key(pass)) ?? [];
  }

  /** Passes of the same microbatch that wait for it. */
  after(pass) {
    return this.users.get(key(pass)) ?? [];
  }
}

/** The needs of a pass in words. */
export function inWords(passes, microbatch) {
  const groups = new Map();
  for (const { rank, kind, chunk, slice, by } of passes) {
    const name = passName(kind, microbatch, chunk, slice);
    const group = `${name} ${by}`;
    if (!groups.has(group)) groups.set(group, { name, by, ranks: [] });
    groups.get(group).ranks.push(rank);
  }
  return [...groups.values()].map(({ name, by, ranks }) => {
    const where = ranks.length > 2 ? `all ${ranks.length} ranks` : `rank ${ranks.join(" and ")}`;
    return `${name} of ${where}${by ? ` (${by})` : ""}`;
  }).join(", ") || "nothing";
}
