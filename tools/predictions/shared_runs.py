"""Iterations that others published from 2024 to 2026: rows of docs/reference/published_2026.csv.

A row becomes a command line of this project: the model's sizes by its name, the layout, the batch
and the precision. Rows that no such line can describe have a reason.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from megatron.schedules.catalogue import TRAITS
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.gpus import GPUS, Gpu
from tools.predictions.shared_models import SharedModel, model_of

SHARED: Final = "published_2026.csv"

Precision = Literal["BF16", "FP8", "MXFP8"]

_PRECISIONS: Final[dict[str, Precision]] = {
    "BF16": "BF16",
    "FP8": "FP8",
    "FP8-CS": "FP8",
    "FP8-CS (FP8-MX)": "FP8",
    "fp8 (25.09 table)": "FP8",
    "MXFP8": "MXFP8",
    "FP8-MX": "MXFP8",
}
_FORMATS: Final[dict[Precision, str]] = {
    "BF16": "",
    "FP8": " --fp8-format hybrid --fp8-recipe tensorwise",
    "MXFP8": " --fp8-format hybrid --fp8-recipe tensorwise",
}
"""Flags of a precision. Sources before 2025 scale by earlier iterations, which takes as long."""

HYBRID: Final = "has layers that this project lacks (Mamba, linear attention)"
NO_LAYOUT: Final = "its layout, batch or time is not published"
SHARDED: Final = "shards its weights (FSDP)"
FOUR_BITS: Final = "multiplies in 4 bits (NVFP4)"
UNKNOWN: Final = "its sizes are not published in full"

OF_EVERY_RUN: Final = (
    "--bf16 --train-iters 1 --lr 1e-4 --attention-dropout 0 --hidden-dropout 0 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--grad-reduce-in-bf16 --use-precision-aware-optimizer --main-grads-dtype bf16"
)
"""Flags that do not depend on the row, nor on the layout."""


@dataclass(frozen=True)
class SharedRun:
    """A row that can be predicted.

    Attributes:
        number: its ``id``.
        origin: the source.
        name: of the model, as the source writes it.
        model: its sizes.
        gpu: the kind of GPU.
        gpus: number of GPUs.
        tensor: t.
        pipeline: p.
        context: c.
        replicas: d.
        experts: ranks e over which experts are spread.
        chunks: model chunks of a pipeline rank.
        micro_batch: sequences of a microbatch.
        global_batch: sequences of an iteration.
        seq_length: tokens of a sequence.
        vocab_size: vocabulary entries.
        precision: of the products.
        seconds: measured, of an iteration.
        tflops: of a GPU, as the source counts them; 0: not given.
        mfu: in percent, as the source counts it; 0: not given.
    """

    number: int
    origin: str
    name: str
    model: SharedModel
    gpu: Gpu
    gpus: int
    tensor: int
    pipeline: int
    context: int
    replicas: int
    experts: int
    chunks: int
    micro_batch: int
    global_batch: int
    seq_length: int
    vocab_size: int
    precision: Precision
    seconds: float
    tflops: float
    mfu: float

    @property
    def microbatches(self) -> int:
        """Microbatches of an iteration."""
        return self.global_batch // (self.replicas * self.micro_batch)

    @property
    def looks_for_scales(self) -> bool:
        """Whether scales of 8 bits follow from the same iteration's largest values of tensors.

        NeMo of 2024 and the benchmarks of 2025 scale by earlier iterations.
        """
        delayed = self.origin.startswith(("NeMo", "dgxc"))
        return self.precision == "FP8" and not delayed

    @property
    def precision_flags(self) -> str:
        """The flags of its precision, behind a space; empty in bf16."""
        return _FORMATS[self.precision]

    @property
    def schedule(self) -> str:
        """The schedule: Megatron-LM's own."""
        return "interleaved" if self.chunks > 1 else "1f1b"

    @property
    def flags(self) -> str:
        """The command line of a dry run of this project in the layout of the row."""
        return self.flags_with(self.schedule, "none")

    def flags_with(self, schedule: str, treatment: str) -> str:
        """Return the command line with another schedule and treatment of the vocabulary.

        Args:
            schedule: its ranks have the ``chunks`` of the row.
            treatment: of the vocabulary.
        """
        words = [
            f"{self.model.flags}--seq-length {self.seq_length} --max-position-embeddings "
            f"{self.seq_length} --vocab-size {self.vocab_size} --micro-batch-size "
            f"{self.micro_batch} --global-batch-size {self.global_batch} {OF_EVERY_RUN} "
            f"--vocab-parallel {treatment} --dry-run --dry-run-gpu "
            f"{self.gpu.name} --tensor-model-parallel-size {self.tensor} "
            f"--pipeline-model-parallel-size {self.pipeline} --context-parallel-size "
            f"{self.context} --dry-run-replicas {self.replicas} --pipeline-schedule "
            f"{schedule}{self.precision_flags}"
        ]
        if TRAITS[schedule].chunk_step:
            words.append(f"--num-virtual-stages-per-pipeline-rank {self.chunks}")
        words += self._divided(has_split_vocabulary=TREATMENTS[treatment].is_sharded)
        if self.tensor > 1:
            words.append("--sequence-parallel")
        if self.context > 1:
            words.append("--cp-comm-type p2p")
        if self.model.mixture:
            words.append(f"--expert-model-parallel-size {self.experts}")
            words.append(
                f"--moe-token-dispatcher-type {'alltoall' if self.experts > 1 else 'allgather'}"
            )
            if self.experts > 1:
                words.append("--expert-tensor-parallel-size 1")
        return " ".join(words)

    def _divided(self, *, has_split_vocabulary: bool) -> Iterator[str]:
        """Yield the flags by which the layers are spread over the stages.

        Megatron-LM gives the last stage fewer layers, because it has the output layer; where this
        is split over all stages, or where there are too many stages for that, the first ones have
        one layer more. Without flags, layers of mixtures are spread by their costs.
        """
        layers, stages = self.model.layers, self.pipeline * self.chunks
        if layers % stages == 0:
            return
        each = -(-layers // stages)
        rest = layers - each * (stages - 1)
        if has_split_vocabulary or (rest < 0 and (layers + 2) % stages):
            if not self.model.mixture:
                yield "--layer-distribution remainder"
        elif (layers + 2) % stages == 0:
            yield "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
        else:
            further = "m" * ("--mtp-num-layers" in self.model.flags)
            yield (
                f"--pipeline-model-parallel-layout E{'t' * each}|({'t' * each}|)*{stages - 2}"
                f"{'t' * rest}{further}L"
            )


def read_shared(path: Path) -> tuple[list[SharedRun], dict[int, str]]:
    """Read the table.

    Returns:
        The rows that can be predicted; and why the others cannot be, by their ``id``.

    Raises:
        ValueError: if the file cannot be read or is no such table.
    """
    runs, left_out = [], {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if reason := _why_not(row):
                    left_out[int(row["id"])] = reason
                else:
                    runs.append(_run(row))
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of published iterations: {error}") from error
    return runs, left_out


def _why_not(row: dict[str, str]) -> str:
    """Return why a row cannot be predicted; empty: it can be."""
    if row["kind"] == "hybrid":
        return HYBRID
    if not (row["tp"] and row["global_batch"] and row["step_time_s"]):
        return NO_LAYOUT
    if row["dp"].startswith("FSDP"):
        return SHARDED
    if row["precision"].startswith("NVFP4"):
        return FOUR_BITS
    return "" if model_of(row["model"]) else UNKNOWN


def _run(row: dict[str, str]) -> SharedRun:
    model = model_of(row["model"])
    assert model is not None, row["model"]

    def number(column: str, otherwise: int = 0) -> int:
        return int(row[column] or otherwise)

    return SharedRun(
        number("id"),
        row["origin"],
        row["model"],
        model,
        GPUS[row["hardware"].split(" ")[0]],
        number("gpus"),
        number("tp"),
        number("pp"),
        number("cp", 1),
        number("dp"),
        number("ep", 1),
        number("vpp", 1),
        number("micro_batch", 1),
        number("global_batch"),
        number("seq"),
        number("vocab"),
        _PRECISIONS[row["precision"]],
        float(row["step_time_s"]),
        float(row["tflops_per_gpu"] or 0),
        float(row["mfu_pct"] or 0),
    )
