"""AdamW by apex's ``FusedAdam``, for which a stand-in of its published signature updates."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import pytest
import torch
from optimizer import apex_stand_in
from optimizer.apex_stand_in import PUBLISHED, installed
from optimizer.entries import entries, optimizer_of
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import main_grad_of
from megatron.optimizer import apex_adamw
from megatron.optimizer.apex_adamw import USED, load_fused_adam
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.settings import Implementation, OptimizerSettings

CPU: Final = torch.device("cpu")
CONFIG: Final = OptimizerSettings(lr=0.1, weight_decay=0.3, adam_beta2=0.95, implementation="apex")
RATES: Final = [Rates(0.1, 0.02, 0.3), Rates(0.05, 0.05, 0.1), Rates(0.2, 0.1, 0.2)]
SHAPES: Final = {"embedding.word_embeddings.weight": (9, 4), "fc.weight": (5, 7), "fc.bias": (5,)}
DECAYING: Final = ("embedding.word_embeddings.weight", "fc.weight")


@pytest.fixture(autouse=True)
def apex() -> Iterator[None]:
    with installed():
        yield


class Trained:
    """A few parameters with an optimizer."""

    def __init__(
        self, config: OptimizerSettings = CONFIG, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.parameters = entries(
            (name, nn.Parameter(start(name, dtype).clone())) for name in SHAPES
        )
        self.bucket = Bucket(self.parameters, kernels_for(CPU, dtype))
        self.optimizer = optimizer_of(config, self.parameters)

    def draw(self, number: int) -> None:
        """Give every parameter the gradient of a step."""
        for entry in self.parameters:
            main_grad_of(entry.parameter).copy_(gradient(entry.name, number))

    def step(self, number: int, norm: float = 3.0, factor: float = 0.3) -> None:
        self.draw(number)
        self.optimizer.step(RATES[number], norm, factor)

    def kept(self) -> dict[str, torch.Tensor]:
        tensors = {
            f"{name}.{kind}": tensor.detach().clone()
            for name in SHAPES
            for kind, tensor in self.optimizer.tensors_of(name).items()
        }
        rounded = {entry.name: entry.parameter.detach().clone() for entry in self.parameters}
        return tensors | rounded


def start(name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name))).to(dtype)


def gradient(name: str, number: int) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(10 * number + 1))


def by_hand(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Three steps in float64 by the formulas of arXiv 1711.05101, clipped from 3 to 1."""
    w = start(name, dtype).double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step, rates in enumerate(RATES, start=1):
        g = gradient(name, step - 1).double() * 0.3 / (3.0 + 1e-6)
        m = CONFIG.adam_beta1 * m + (1 - CONFIG.adam_beta1) * g
        v = CONFIG.adam_beta2 * v + (1 - CONFIG.adam_beta2) * g * g
        m_hat, v_hat = m / (1 - CONFIG.adam_beta1**step), v / (1 - CONFIG.adam_beta2**step)
        lr = rates.vocabulary_lr if "word_embeddings" in name else rates.lr
        decay = rates.weight_decay if name in DECAYING else 0.0
        w = w - lr * (decay * w + m_hat / (v_hat.sqrt() + CONFIG.adam_eps))
    return {"weight": w, "exp_avg": m, "exp_avg_sq": v}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_steps_follow_the_formulas(dtype: torch.dtype) -> None:
    trained = Trained(dtype=dtype)
    for number in range(len(RATES)):
        trained.step(number)
    for entry in trained.parameters:
        own, expected = trained.optimizer.tensors_of(entry.name), by_hand(entry.name, dtype)
        assert own.keys() == expected.keys()
        for kind, tensor in own.items():
            exact = expected[kind].float()
            torch.testing.assert_close(tensor.detach(), exact, rtol=1e-5, atol=1e-6)
        assert torch.equal(entry.parameter, own["weight"].detach().to(dtype))


def assert_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def test_tensors_that_are_too_long_are_handed_over_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Trained()
    monkeypatch.setattr(apex_adamw, "MOST_ELEMENTS", 8)
    parts = Trained()
    for number in range(2):
        whole.step(number)
        parts.step(number)
    assert_equal(parts.kept(), whole.kept())


def test_a_step_is_undone_to_the_last_bit() -> None:
    trained, once = Trained(), Trained()
    trained.step(0)
    trained.optimizer.save()
    before = trained.kept()
    trained.step(1)
    trained.optimizer.restore()
    assert_equal(trained.kept(), before)
    for number in (0, 1):
        once.step(number)
    trained.step(1)
    assert_equal(trained.kept(), once.kept())


def test_a_step_on_a_guess_leaves_the_gradients_scaled() -> None:
    """So that the right step is the clipped one, to the bits of one that waited."""
    waited, guessed = (Trained(replace(CONFIG, post_validation=True)) for _ in range(2))
    for trained in (waited, guessed):
        trained.draw(0)
    guessed.optimizer.save()
    guessed.optimizer.step(RATES[0], 0.5, 0.3)
    guessed.optimizer.restore()
    guessed.optimizer.step(RATES[0], 3.0)
    waited.optimizer.step(RATES[0], 3.0, 0.3)
    assert_equal(guessed.kept(), waited.kept())


@pytest.mark.parametrize("before", ["apex", "torch"])
def test_a_checkpoint_of_one_goes_on_under_the_other(before: Implementation) -> None:
    after: Implementation = "torch" if before == "apex" else "apex"
    saved, going_on, through = (
        Trained(replace(CONFIG, implementation=each)) for each in (before, after, after)
    )
    for number in range(2):
        saved.step(number)
        through.step(number)
    with torch.no_grad():
        for name in SHAPES:
            kept = saved.optimizer.tensors_of(name)
            for kind, tensor in going_on.optimizer.tensors_of(name).items():
                tensor.copy_(kept[kind])
    going_on.optimizer.loaded(saved.optimizer.steps)
    for each in (saved, going_on, through):
        each.step(2)
    ours, expected, other = (each.kept() for each in (going_on, saved, through))
    for name, tensor in expected.items():
        unit = 2.0**-7 if tensor.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(ours[name], tensor, rtol=unit, atol=1e-6)
        torch.testing.assert_close(other[name], tensor, rtol=unit, atol=1e-6)


def test_only_published_arguments_are_given() -> None:
    assert set(USED.split()) <= {"params", *PUBLISHED}
    stand_in = inspect.signature(apex_stand_in.FusedAdam).parameters
    defaults = {name: each.default for name, each in stand_in.items() if name in PUBLISHED}
    assert defaults == PUBLISHED, "the tests would call something else"
    assert load_fused_adam() is apex_stand_in.FusedAdam


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (
            {"apex/optimizers/__init__.py": None, "apex/__init__.py": "raise SystemExit\n"},
            "not NVIDIA's, but another project",
        ),
        (
            {"apex/optimizers/__init__.py": None, "apex/__init__.py": None, "apex.py": ""},
            "not NVIDIA's, but another project",
        ),
        ({"apex/optimizers/__init__.py": "import nowhere\n"}, "does not load here .*nowhere"),
        ({"apex/optimizers/__init__.py": ""}, "does not load here .*FusedAdam"),
        (
            {
                "apex/optimizers/__init__.py": (
                    "from optimizer.apex_stand_in import WithoutMode as FusedAdam\n"
                )
            },
            "FusedAdam has no bias_correction, adam_w_mode, set_grad_none",
        ),
        (
            {"amp_C.py": "raise ImportError('amp_C.so: undefined symbol')\n"},
            "without its CUDA extensions .*undefined symbol",
        ),
        ({"amp_C.py": ""}, "without multi_tensor_adam"),
    ],
    ids=[
        "another",
        "a module",
        "broken",
        "no class",
        "arguments",
        "kernels of another PyTorch",
        "no Adam",
    ],
)
def test_what_it_lacks_is_named(changed: Mapping[str, str | None], fault: str) -> None:
    with installed(changed), pytest.raises(ValueError, match=fault):
        load_fused_adam()
