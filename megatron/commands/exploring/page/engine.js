// Who answers requests: the server that served this page, or Python in the browser.
//
// Both have channels, which answer one request after the other: one for what is shown, one for the
// comparison beside it. A newer request on a channel makes an older one that still runs fail with
// `Superseded`.

export class Superseded extends Error {}

/** Returns a function that makes a channel by its name; the channel tells how far its start is. */
export async function openEngine() {
  const { engine } = await (await fetch("engine.json")).json();
  return engine === "pyodide"
    ? (name, tell = () => {}) => new WorkerChannel(tell)
    : (name) => new ServerChannel(name);
}

/** The answer, or the error that it tells. */
function settled(text) {
  const found = JSON.parse(text);
  if (found.error !== undefined) throw new Error(found.error);
  return found;
}

class ServerChannel {
  constructor(name) {
    this.name = `${name}-${crypto.randomUUID?.() ?? Math.random()}`;
    this.running = null;
  }

  async ask(request) {
    this.running?.abort();
    const own = this.running = new AbortController();
    try {
      const response = await fetch("explore", {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-Channel": this.name },
        body: JSON.stringify(request),
        signal: own.signal,
      });
      return settled(await response.text());
    } catch (error) {
      if (own.signal.aborted) throw new Superseded();
      throw error instanceof TypeError ? new Error("the server does not answer: is the explorer still running?") : error;
    }
  }
}

const PATIENCE = 1500; // ms that a newer request waits before it ends the Python of an older one

class WorkerChannel {
  constructor(tell) {
    this.tell = tell;
    this.serial = 0;
    this.worker = null;
    this.waiting = null;
  }

  async ask(request) {
    const serial = ++this.serial;
    if (this.waiting !== null) {
      const done = this.waiting.done;
      await Promise.race([done, new Promise((wake) => setTimeout(wake, PATIENCE))]);
      if (serial !== this.serial) throw new Superseded();
      if (this.waiting?.done === done && this.ready) this.stop();
      else if (this.waiting !== null) await this.waiting.done;
      if (serial !== this.serial) throw new Superseded();
    }
    return settled(await this.post(JSON.stringify(request)));
  }

  post(text) {
    this.worker ??= this.start();
    const waiting = this.waiting = {};
    const answered = new Promise((resolve, reject) => Object.assign(waiting, { resolve, reject }));
    waiting.done = answered.then(() => {}, () => {}).then(() => {
      if (this.waiting === waiting) this.waiting = null;
    });
    this.worker.postMessage(text);
    return answered;
  }

  start() {
    this.ready = false;
    const worker = new Worker("worker.js", { type: "module" });
    worker.onmessage = ({ data }) => {
      if (data.progress !== undefined) {
        this.ready = data.progress === "";
        this.tell(data.progress);
      } else this.waiting?.resolve(data.answer);
    };
    worker.onerror = (event) => this.waiting?.reject(new Error(`Python cannot start in this browser: ${event.message}`));
    return worker;
  }

  stop() {
    this.worker.terminate();
    this.worker = null;
    this.waiting.reject(new Superseded());
    this.waiting = null;
  }
}
