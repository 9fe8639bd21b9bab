"""The kernels of a GPU that is only asked about: attention takes the kernel that the GPU has."""

import pytest
import torch
from harness.small_models import Operators
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.counted import AMPERE, CountedGpu, counted_kernels
from megatron.kernels.scores import Scores

META = torch.device("meta")


class Attention(Operators):
    """Notes which kernels of attention are called."""

    @property
    def kernels(self) -> list[str]:
        """Names of PyTorch's kernels, and of products in batches."""
        names = [name.removeprefix("aten::") for name in self.names]
        return [name for name in names if "attention" in name or name == "bmm"]


FLASH, EFFICIENT, CUDNN = (
    f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")
)
HOPPER = CountedGpu(has_cudnn_attention=True)


@pytest.mark.parametrize(
    ("dtype", "heads", "channels", "expected"),
    [
        (torch.bfloat16, 4, 128, [FLASH]),
        (torch.float16, 4, 12, [FLASH]),
        (torch.float32, 2, 128, [EFFICIENT]),
        (torch.float32, 4, 128, ["_efficient_attention_forward"]),
        (torch.bfloat16, 2, 320, [EFFICIENT]),
        (torch.bfloat16, 4, 320, ["bmm", "bmm"]),
    ],
)
def test_attention_is_by_the_kernel_that_the_gpu_has(
    dtype: torch.dtype, heads: int, channels: int, expected: list[str]
) -> None:
    q, k, v = (_drawn(dtype, number, channels) for number in (heads, 2, 2))
    with Attention() as attention:
        out = counted_kernels(dtype).causal_attention(q, k, v)
    assert out.shape == q.shape
    assert attention.kernels == expected
    out.backward(torch.empty_like(out))
    assert q.grad is not None
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weight_gradients_are_added_in_their_products(dtype: torch.dtype) -> None:
    assert counted_kernels(dtype).accumulates_products


def test_kernels_are_made_once() -> None:
    assert counted_kernels(torch.bfloat16) is counted_kernels(torch.bfloat16)


@pytest.mark.parametrize(
    ("gpu", "dtype", "dropout", "expected"),
    [
        (AMPERE, torch.bfloat16, 0.0, [FLASH]),
        (HOPPER, torch.bfloat16, 0.0, [CUDNN, CUDNN]),
        (HOPPER, torch.bfloat16, 0.1, [FLASH]),
        (HOPPER, torch.float32, 0.0, [EFFICIENT]),
    ],
)
def test_fewer_queries_than_keys_are_one_kernel_or_two(
    gpu: CountedGpu, dtype: torch.dtype, dropout: float, expected: list[str]
) -> None:
    q, k, v = (_drawn(dtype, 2, 64) for _ in range(3))
    with Attention() as attention:
        counted_kernels(dtype, gpu).causal_attention(
            q[:, :, 4:], k, v, options=AttentionOptions(dropout=dropout)
        )
    assert attention.kernels == expected


WINDOWED = "_flash_attention_forward"


@pytest.mark.parametrize(
    ("scores", "dtype", "dropout", "expected"),
    [
        (Scores(window=3), torch.bfloat16, 0.0, [WINDOWED]),
        (Scores(scale=0.3, window=3), torch.float16, 0.0, [WINDOWED]),
        (Scores(window=3), torch.bfloat16, 0.1, ["bmm", "bmm"]),
        (Scores(window=3), torch.float32, 0.0, ["bmm", "bmm"]),
        (Scores(window=3, softcap=2.0), torch.bfloat16, 0.0, ["bmm", "bmm"]),
        (Scores(slopes_a=(0.5, 0.25)), torch.bfloat16, 0.0, ["bmm", "bmm"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [0, 4])
def test_windows_alone_are_one_kernel(
    first: int, scores: Scores, dtype: torch.dtype, dropout: float, expected: list[str]
) -> None:
    q, k, v = (_drawn(dtype, 2, 64) for _ in range(3))
    with Attention() as attention:
        counted_kernels(dtype).causal_attention(
            q[:, :, first:], k, v, options=AttentionOptions(scores, dropout)
        )
    assert attention.kernels == expected


def test_plain_attention_counts_as_flash_attention_on_every_gpu() -> None:
    """PyTorch chooses between kernels that read, write and keep tensors of the same sizes."""
    q, k, v = (_drawn(torch.bfloat16, 2, 64) for _ in range(3))
    with Attention() as attention:
        counted_kernels(torch.bfloat16, HOPPER).causal_attention(q, k, v)
    assert attention.kernels == [FLASH]


def _drawn(dtype: torch.dtype, heads: int, channels: int) -> Tensor:
    return torch.empty(2, heads, 8, channels, dtype=dtype, device=META, requires_grad=True)
