"""AdamW by kernels that take one pass is AdamW by PyTorch's, but for rounding.

The kernels are those of a GPU, which Triton interprets where there is none.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest
import torch
from optimizer.entries import ALONE, QKV, entries, optimizer_of
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.kernels.cuda.kernels import CudaKernels
from megatron.kernels.face import Kernels
from megatron.layers.main_grad import main_grad_of
from megatron.model.ownership import OwnedParameter
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.make import make_optimizer
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.settings import OptimizerSettings

pytest.importorskip("triton")

DEVICE: Final = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG: Final = OptimizerSettings(lr=0.1, weight_decay=0.3, clip_grad=1.0, adam_beta2=0.95)
RATES: Final = Rates(0.1, 0.02, 0.3)
SHAPES: Final = {"embedding.word_embeddings.weight": (9, 4), "fc.weight": (5, 7), "norm": (37,)}


class Trained:
    """A few parameters with an optimizer of the kernels of a GPU, or of PyTorch's."""

    def __init__(
        self,
        config: OptimizerSettings = CONFIG,
        *,
        one_pass: bool,
        dtype: torch.dtype = torch.bfloat16,
        gradients: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = entries(
            (name, nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype)))
            for name, shape in SHAPES.items()
        )
        kernels: Kernels = kernels_for(DEVICE, dtype)
        self.bucket = Bucket(self.parameters, kernels, gradient_dtype=gradients)
        self.optimizer = self._optimizer(config, self.parameters, dtype, one_pass=one_pass)

    @staticmethod
    def _optimizer(
        config: OptimizerSettings,
        owned: Sequence[OwnedParameter],
        dtype: torch.dtype,
        *,
        one_pass: bool,
    ) -> Optimizer:
        if not one_pass:
            return optimizer_of(config, owned)
        kernels = CudaKernels(DEVICE, dtype)
        return make_optimizer(config, QKV, ALONE, kernels, list(map(ParameterPart.whole, owned)))

    def draw(self, number: int) -> None:
        """Give every parameter the gradient of a step."""
        generator = torch.Generator().manual_seed(number)
        for entry in self.parameters:
            gradient = main_grad_of(entry.parameter)
            gradient.copy_(torch.randn(gradient.shape, generator=generator).bfloat16())

    def step(self, number: int) -> None:
        self.draw(number)
        self.optimizer.step(RATES, 3.0, 0.3)  # both to be scaled and clipped

    def kept(self) -> dict[str, torch.Tensor]:
        tensors = {
            f"{name}.{kind}": tensor.clone()
            for name in SHAPES
            for kind, tensor in self.optimizer.tensors_of(name).items()
        }
        rounded = {entry.name: entry.parameter.detach().clone() for entry in self.parameters}
        return tensors | rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=str)
def test_some_steps_are_those_of_pytorch(dtype: torch.dtype, gradients: torch.dtype) -> None:
    ours, expected = (
        Trained(one_pass=one_pass, dtype=dtype, gradients=gradients) for one_pass in (True, False)
    )
    for number in range(4):
        ours.step(number)
        expected.step(number)
    loose = 1e-2 if gradients == torch.bfloat16 else 0.0  # quotients in bf16 are rounded otherwise
    own = ours.kept()
    for name, tensor in expected.kept().items():
        unit = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(tensor.dtype, 1e-5)
        torch.testing.assert_close(own[name], tensor, rtol=unit + loose, atol=1e-5 + loose)
    assert ours.optimizer.steps == 4


def test_moments_in_bf16_stay_in_bf16() -> None:
    config = replace(CONFIG, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    ours, expected = (Trained(config, one_pass=one_pass) for one_pass in (True, False))
    for number in range(4):
        ours.step(number)
        expected.step(number)
    own = ours.kept()
    for name, tensor in expected.kept().items():
        assert own[name].dtype == tensor.dtype
        torch.testing.assert_close(own[name], tensor, rtol=0.03, atol=0.01)


def assert_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("post_validation", [False, True])
def test_a_step_is_undone_to_the_last_bit(post_validation: bool) -> None:
    config = replace(CONFIG, post_validation=post_validation)
    # in fp16, because Triton's interpreter cuts digits of bf16 off, and PyTorch rounds after all
    trained, once = (Trained(config, one_pass=True, dtype=torch.float16) for _ in range(2))
    trained.step(0)
    trained.optimizer.save()
    before = trained.kept()
    trained.step(1)
    trained.optimizer.restore()
    assert_equal(trained.kept(), before)
    trained.step(1)
    for number in range(2):
        once.step(number)
    assert_equal(trained.kept(), once.kept())


def test_a_step_on_a_guess_leaves_the_gradients_scaled() -> None:
    """So that the right step is the clipped one, to the bits of one that waited."""
    config = replace(CONFIG, post_validation=True)
    waited, guessed = (Trained(config, one_pass=True) for _ in range(2))
    for trained in (waited, guessed):
        trained.draw(0)
    guessed.optimizer.save()
    guessed.optimizer.step(RATES, 0.5, 0.3)
    guessed.optimizer.restore()
    guessed.optimizer.step(RATES, 3.0)
    waited.optimizer.step(RATES, 3.0, 0.3)
    assert_equal(guessed.kept(), waited.kept())


def test_without_post_validation_gradients_are_only_read() -> None:
    trained = Trained(one_pass=True)
    trained.draw(0)
    before = trained.bucket.gradients.clone()
    trained.optimizer.step(RATES, 3.0, 0.3)
    assert torch.equal(trained.bucket.gradients, before)


def test_steps_that_were_loaded_count() -> None:
    trained, fresh = (Trained(one_pass=True) for _ in range(2))
    fresh.optimizer.loaded(10)
    for each in (trained, fresh):
        each.step(0)
    assert fresh.optimizer.steps == 11
    name = "norm"
    own, other = (each.optimizer.tensors_of(name) for each in (trained, fresh))
    assert torch.equal(own["exp_avg"], other["exp_avg"])
    assert not torch.equal(own["weight"], other["weight"])  # the means are corrected less
