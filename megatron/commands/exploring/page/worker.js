// Python in the browser: unpacks our code beside Pyodide's standard library, and answers requests.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const START = `
import sys
sys.path.insert(0, "/code")
from megatron.commands.exploring.interface import answer
from megatron.commands.exploring.simulated import Simulations
_simulations = Simulations()
lambda text: answer(text, _simulations)
`;

async function start() {
  postMessage({ progress: "Starting Python in this browser (14 MB, once)" });
  const [python, archive] = await Promise.all([
    loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href }),
    fetch("python.zip").then((response) => response.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip", { extractDir: "/code" });
  const answer = python.runPython(START);
  postMessage({ progress: "" });
  return answer;
}

const started = start();

onmessage = async ({ data }) => {
  try {
    const answer = await started;
    postMessage({ answer: answer(data) });
  } catch (error) {
    postMessage({ answer: JSON.stringify({ error: String(error.message ?? error) }) });
  }
};
