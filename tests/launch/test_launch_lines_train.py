"""The flags of public launch scripts train: cut down in size and layout, otherwise as they are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.launch_lines_page import LaunchList, launch_lists, told

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600
"""Seconds after which a job counts as hanging."""

ITERATIONS = 3
LAYERS = 8
RANKS = 4

SIZES = {
    "--num-layers": str(LAYERS),
    "--num-layers-per-virtual-pipeline-stage": "2",
    "--hidden-size": "64",
    "--ffn-hidden-size": "96",
    "--num-attention-heads": "8",
    "--num-query-groups": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--micro-batch-size": "1",
    "--log-interval": "1",
    "--eval-iters": "1",
    "--eval-interval": "2",
    "--lr": "1e-3",
    "--min-lr": "1e-4",
    "--pad-vocab-size-to": "640",
    "--kv-channels": "8",
    "--num-experts": "8",
    "--moe-router-topk": "2",
    "--moe-router-num-groups": "2",
    "--moe-router-group-topk": "1",
    "--moe-ffn-hidden-size": "32",
    "--moe-shared-expert-intermediate-size": "64",
    "--q-lora-rank": "32",
    "--kv-lora-rank": "16",
    "--qk-head-dim": "8",
    "--qk-nope-head-dim": "8",
    "--qk-pos-emb-head-dim": "16",
    "--qk-rope-head-dim": "16",
    "--v-head-dim": "8",
    "--initial-loss-scale": "1024",
}
"""What stands in place of a script's values."""

LEFT_OUT = {
    "--data-path", "--split", "--tokenizer-model", "--tokenizer-type", "--data-cache-path",
    "--distributed-backend", "--train-iters", "--train-samples", "--global-batch-size",
    "--rampup-batch-size", "--step-batch-size-schedule", "--tensorboard-dir", "--wandb-project",
    "--wandb-name", "--wandb-entity", "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size", "--expert-model-parallel-size",
    "--expert-tensor-parallel-size", "--pipeline-model-parallel-layout", "--mock-data",
    "--async-save", "--vocab-size",
    "--train-weighted-split-paths-path", "--valid-weighted-split-paths-path",
    "--deepspeed_config", "--pp-partition-method",
}  # fmt: skip
"""The data, their tokens, the network, the length and the layout are other ones here; curves need a
package that may not be there."""

SPANS = re.compile(
    r"--lr-(decay|warmup)-(iters|samples|fraction)|--tensorboard-.*|--log-.*-tensor.*"
)


def layout_of(launch: LaunchList) -> tuple[int, int, int]:
    """Ranks t, p and d: two at least of each of the axes t and p that the script has.

    There are four ranks, and replicas if there is room: every rank takes seconds to start. A script
    with experts on several ranks has two replicas of four ranks.
    """
    t = min(launch.size("tensor-model"), 2)
    p = min(launch.size("pipeline-model"), 4 if t == 1 else 2)
    of_replica = t * p
    if of_replica == RANKS and launch.size("expert-model") > 1:
        return t, p, 2
    return t, p, RANKS // of_replica


def experts_of(launch: LaunchList) -> list[str]:
    """Ranks e and etp of the script's experts, at most two of each."""
    t, _, d = layout_of(launch)
    shared = min(launch.size("expert-tensor", t), t)
    spread = min(launch.size("expert-model"), t * d // shared, 2)
    axes = {"model": spread, "tensor": shared}
    return [word for a, n in axes.items() for word in (f"--expert-{a}-parallel-size", str(n))]


def words_of(launch: LaunchList, folder: Path) -> list[str]:
    """The script's flags, without those that are refused, in small."""
    refused = {answer.flag.split()[0] for answer in told(launch) if answer.verdict == "refused"}
    places = {
        "--save": folder / "checkpoints",
        "--load": folder / "checkpoints",
        "--kill-switch-path": folder / "stop",
        "--trigger-path": folder,
    }
    t, p, d = layout_of(launch)
    options = {flag[0] for flag in launch.flags}
    words = experts_of(launch) if "--num-experts" in options else []
    words += [
        *("--tensor-model-parallel-size", str(t), "--pipeline-model-parallel-size", str(p)),
        *("--train-iters", str(ITERATIONS), "--global-batch-size", str(8 * d)),
        *("--mock-data", "--vocab-size", "500", "--device", "cpu", "--peak-tflops", "0.1"),
    ]
    for option, *values in launch.flags:
        if option in refused | LEFT_OUT or SPANS.fullmatch(option):
            continue
        if option in places:
            values = [str(places[option])]
        elif option == "--num-layers" and "--account-for-loss-in-pipeline-split" in options:
            values = [str(LAYERS + LAYERS - 2)]  # embedding and loss count as layers
        elif (option, values) == ("--moe-token-dispatcher-type", ["flex"]):
            values = ["alltoall"]  # the package DeepEP moves tokens between GPUs only
        elif option in SIZES:
            values = [SIZES[option]]
        elif option == "--moe-layer-freq" and "[" in values[0]:
            dense = int("[0]" in values[0])
            values = [f"[0]*{dense}+[1]*{LAYERS - dense}"]
        words += [option, *values]
    if "--fp16" in words and "--initial-loss-scale" not in words:
        words += ["--initial-loss-scale", SIZES["--initial-loss-scale"]]
    return words


@pytest.mark.full
@pytest.mark.parametrize("launch", launch_lists(), ids=lambda launch: launch.name)
def test_the_flags_of_a_public_script_train(launch: LaunchList, tmp_path: Path) -> None:
    t, p, d = layout_of(launch)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(t * p * d)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    job = subprocess.run(
        [*torchrun, str(ROOT / "pretrain_gpt.py"), *words_of(launch, tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    line = r"iteration +(\d+)/ +3 \|.*lm loss: (\S+) \|.*number of skipped iterations: +0"
    trained = re.findall(line, job.stdout + job.stderr)
    assert [int(number) for number, _ in trained] == [1, 2, 3], job.stdout
    assert all(0 < float(loss) < 10 for _, loss in trained)
