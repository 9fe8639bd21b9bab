"""Moments in bf16 are rounded ones; what is fp32 is computed as by AdamW, to the last bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from optimizer.entries import entries, optimizer_of, rates_of
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.kernels.reference import optimizer as reference
from megatron.layers.main_grad import main_grad_of
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.settings import MomentType, OptimizerSettings

CPU = torch.device("cpu")
CONFIG = OptimizerSettings(lr=0.1, weight_decay=0.3, clip_grad=1.0, adam_beta2=0.95)
RATES = rates_of(CONFIG, 0.1)
SHAPES = {"embedding.word_embeddings.weight": (9, 4), "norm": (37,)}
STEPS = 5


class Trained:
    """A few parameters after some steps on random gradients."""

    def __init__(
        self,
        config: OptimizerSettings,
        gradients: torch.dtype = torch.float32,
        make: Callable[..., Optimizer] = optimizer_of,
        steps: int = STEPS,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = entries(
            (name, nn.Parameter(torch.randn(shape, generator=generator).bfloat16()))
            for name, shape in SHAPES.items()
        )
        kernels = kernels_for(CPU, torch.bfloat16)
        self.bucket = Bucket(self.parameters, kernels, gradient_dtype=gradients)
        self.optimizer = make(config, self.parameters)
        for number in range(steps):
            self.step(number)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for entry in self.parameters:
            gradient = main_grad_of(entry.parameter)
            drawn = torch.randn(gradient.shape, generator=generator)
            gradient.copy_(drawn.bfloat16())  # alike in both types
        self.optimizer.step(RATES, 3.0, 0.5)  # both to be scaled and clipped

    def kept(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{kind}": tensor.clone()
            for name in SHAPES
            for kind, tensor in self.optimizer.tensors_of(name).items()
        }


def assert_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def test_in_fp32_it_is_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Trained(CONFIG).kept()
    monkeypatch.setattr(reference, "_is_narrow", lambda _: True)
    assert_equal(Trained(CONFIG).kept(), expected)


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=str)
def test_slices_change_nothing(gradients: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    whole = Trained(config, gradients).kept()
    monkeypatch.setattr(reference, "ELEMENTS_AT_ONCE", 16)
    assert_equal(Trained(config, gradients).kept(), whole)


@pytest.mark.parametrize("first", ["fp32", "bf16"])
@pytest.mark.parametrize("second", ["fp32", "bf16"])
@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_adams_from_rounded_moments(
    first: MomentType, second: MomentType, gradients: torch.dtype
) -> None:
    """By the formulas of arXiv 1711.05101 in float64, from the tensors before the step."""
    config = replace(CONFIG, exp_avg_dtype=first, exp_avg_sq_dtype=second)
    trained = Trained(config, gradients)
    before = trained.kept()
    trained.step(STEPS)
    scale = 0.5 * CONFIG.clip_grad / (3.0 + 1e-6)
    for entry in trained.parameters:
        name, after = entry.name, trained.optimizer.tensors_of(entry.name)
        generator = torch.Generator().manual_seed(STEPS)
        drawn = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
        gradient = (drawn[name].bfloat16().double() * scale).to(gradients).double()
        weight, mean, square = (
            before[f"{name}.{kind}"].double() for kind in ("weight", "exp_avg", "exp_avg_sq")
        )
        mean = CONFIG.adam_beta1 * mean + (1 - CONFIG.adam_beta1) * gradient
        square = CONFIG.adam_beta2 * square + (1 - CONFIG.adam_beta2) * gradient**2
        weight = weight * (1 - 0.1 * (0.3 if CONFIG.decays(name, weight.dim()) else 0.0))
        root = (square / (1 - CONFIG.adam_beta2 ** (STEPS + 1))).sqrt() + CONFIG.adam_eps
        weight -= 0.1 * mean / (1 - CONFIG.adam_beta1 ** (STEPS + 1)) / root
        half_unit = {"fp32": 1e-6, "bf16": 2**-8}
        for kind, exact, kept in (("exp_avg", mean, first), ("exp_avg_sq", square, second)):
            got = after[kind].double()
            torch.testing.assert_close(got, exact, rtol=half_unit[kept], atol=1e-7)
        torch.testing.assert_close(after["weight"].double(), weight, rtol=0, atol=2e-6)
        assert after["weight"].dtype == torch.float32
        types = {"fp32": torch.float32, "bf16": torch.bfloat16}
        assert (after["exp_avg"].dtype, after["exp_avg_sq"].dtype) == (types[first], types[second])
        assert torch.equal(entry.parameter, after["weight"].bfloat16())


def test_a_step_is_undone_to_the_last_bit() -> None:
    config = replace(CONFIG, exp_avg_dtype="bf16")
    trained = Trained(config)
    trained.optimizer.save()
    before = trained.kept()
    trained.step(STEPS)
    trained.optimizer.restore()
    assert_equal(trained.kept(), before)
    trained.step(STEPS)
    assert_equal(trained.kept(), Trained(config, steps=STEPS + 1).kept())


def test_a_step_on_a_guess_leaves_the_gradients_scaled() -> None:
    """So that the right step is the clipped one, to the bits of one that waited."""
    config = replace(CONFIG, exp_avg_sq_dtype="bf16")
    waited, guessed = (Trained(config, torch.bfloat16) for _ in range(2))
    for trained in (waited, guessed):
        for entry in trained.parameters:
            main_grad_of(entry.parameter).fill_(0.7)
    guessed.optimizer.save()
    guessed.optimizer.step(RATES, 0.5, 0.3)
    guessed.optimizer.restore()
    guessed.optimizer.step(RATES, 3.0)
    waited.optimizer.step(RATES, 3.0, 0.3)
    assert_equal(guessed.kept(), waited.kept())
