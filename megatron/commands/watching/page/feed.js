// Where the values come from: they stand in the page, or a server on this machine has them.

import { element } from "./words.js";

export function openFeed() {
  const within = element("values");
  return within ? new Embedded(JSON.parse(within.textContent)) : new Served();
}

/** A page in one file has its values within, whatever part is asked for. */
class Embedded {
  constructor(values) { Object.assign(this, { isLive: false, all: values }); }

  async values() { return this.all; }
}

class Served {
  constructor() { this.isLive = true; }

  /** The values for a view; only their version, if the page has `seen` this version already. */
  async values({ axis, range, points }, seen) {
    const asked = new URLSearchParams({ axis, points });
    if (range) { asked.set("from", range[0]); asked.set("to", range[1]); }
    if (seen !== null) asked.set("seen", seen);
    const answer = await fetch(`values.json?${asked}`);
    if (!answer.ok) throw new Error(`the server answers ${answer.status} ${answer.statusText}`);
    return answer.json();
  }
}
