"""The same training in plain PyTorch under ``torch.compile``, with its own loss or Liger's."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn

from megatron.parallel.groups import single_rank
from megatron.planning.run_plan import make_run_plan
from megatron.runtime.batch import to_device
from megatron.simulator.costs.gpus import GIB
from megatron.training.metrics.peak_memory import peak_memory
from megatron.training.setup import build_train_state
from tools.benchmarking.case import BenchmarkCase
from tools.benchmarking.plain_model import Stage, make_stage
from tools.benchmarking.run import recorded_step
from tools.gpu_sections.timing import Scale, Section, seconds_of, table
from tools.gpu_sections.training import case_of

LR: Final = 1e-4
LIGER: Final = "liger_kernel"


class FusedLoss(nn.Module):
    """A plain model whose output layer and loss are one kernel of Liger."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        self.stage = stage
        self.loss: Callable[..., Tensor] = LigerFusedLinearCrossEntropyLoss()

    def forward(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        """Return the mean loss."""
        x_bsh = self.stage.embedding(tokens_bs)
        for layer in self.stage.decoder["layers"].children():
            x_bsh = layer(x_bsh)
        x_bsh = self.stage.decoder["final_layernorm"](x_bsh)
        weight_vh = self.stage.output_layer.weight
        return self.loss(weight_vh, x_bsh.flatten(0, 1), targets_bs.flatten())


def measure(scale: Scale) -> Section:
    """Train each way from the same weights on the same microbatches."""
    case = case_of(scale, "1f1b")
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "ours, 1F1B": lambda: _ours(scale, case),
        "plain, torch.compile": lambda: _plain(scale, case, lambda stage: stage),
    }
    if find_spec(LIGER) is not None:
        ways["plain, torch.compile, Liger's loss"] = lambda: _plain(scale, case, FusedLoss)
    found = {}
    for name, way in ways.items():
        found[name] = way()
        scale.forget_peak()
    own = found["ours, 1F1B"]["seconds"]
    rows = [
        (name, 1e3 * each["seconds"], own / each["seconds"], each["bytes"] / GIB, each["loss"])
        for name, each in found.items()
    ]
    said = "The same weights, microbatches and AdamW; the loss is that of the first iteration."
    if find_spec(LIGER) is None:
        said += " Liger is not installed."
    head = ("way", "iteration, ms", "ours / its time", "peak, GiB", "first loss")
    return Section([said, "", *table(head, rows)], dict(found))


def _ours(scale: Scale, case: BenchmarkCase) -> dict[str, float]:
    config = case.run_config()
    state = build_train_state(config, single_rank(scale.device), make_run_plan(config))
    batch = to_device(case.batch(), scale.device)

    def train() -> float:
        return recorded_step(state, batch, 0)[0]["loss"]

    first = train()
    return {"seconds": seconds_of(scale, train, ahead=False), "loss": first, **_held(scale)}


def _plain(
    scale: Scale, case: BenchmarkCase, wrap: Callable[[Stage], nn.Module]
) -> dict[str, float]:
    """Weights and activations in bf16, the optimizer's states too: PyTorch's own defaults."""
    stage = make_stage(case, 0, 1, scale.device)
    options: dict[str, Any] = {"backend": "aot_eager"} if scale.small else {}
    model = torch.compile(wrap(stage), **options)
    on_gpu = scale.device.type == "cuda"
    optimizer = torch.optim.AdamW(stage.parameters(), LR, fused=on_gpu)
    batch = [(own.tokens.to(scale.device), own.labels.to(scale.device)) for own in case.batch()]

    def train() -> float:
        total = torch.zeros((), device=scale.device)
        for tokens, targets in batch:
            loss = model(tokens, targets) / len(batch)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return float(total)

    first = train()
    return {"seconds": seconds_of(scale, train, ahead=False), "loss": first, **_held(scale)}


def _held(scale: Scale) -> dict[str, float]:
    return {"bytes": float(peak_memory(scale.device).held)}
