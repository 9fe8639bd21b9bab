"""What of PyTorch is replaced while a pretended GPU is there: streams, events, a few kernels."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import torch
from pretended_gpu.order import Mark
from torch import Tensor
from torch.nn import functional

from megatron.kernels.reference import kernels as reference

if TYPE_CHECKING:
    from pretended_gpu.gpu import PretendedGpu

_CUDA = 1
"""``c10::DeviceType::CUDA``."""

_aten = torch.ops.aten


@contextmanager
def kernels() -> Iterator[None]:
    """Take one kernel where CUDA has one, which the CPU build would replace by several."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward"):
        library.impl(name, _only_its_shape_is_asked_for, "CUDA")
    library.impl("_fused_sgd_", _returns_nothing, "Meta")  # PyTorch has that of Adam only
    try:
        with (
            patch.object(functional, "scaled_dot_product_attention", _attention_of_a_gpu),
            patch.object(reference, "causal_lower_right", lambda queries, keys: "lower right"),
        ):
            yield
    finally:
        library._destroy()


def _returns_nothing(*_: Any, **__: Any) -> None:
    """Change the arguments, of which only the shapes are there."""


def _only_its_shape_is_asked_for(*_: Any) -> Any:
    raise AssertionError("a fake tensor has no values to compute with")


def _attention_of_a_gpu(
    q_basd: Tensor,
    k_bgsd: Tensor,
    v_bgsd: Tensor,
    attn_mask: str | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    scale: float | None = None,
) -> Tensor:
    """Take a kernel that a GPU would; where there is none, PyTorch falls back on products.

    Flash attention knows bf16 and query groups, the memory-efficient kernel fp32 without groups.
    Both know queries of the last positions only, which is what PyTorch's bias stands for.
    """
    is_causal = is_causal or attn_mask is not None
    if q_basd.dtype == torch.bfloat16:
        flash_basd: Tensor = _aten._scaled_dot_product_flash_attention(
            q_basd, k_bgsd, v_bgsd, dropout_p, is_causal, scale=scale
        )[0]
        return flash_basd
    assert not enable_gqa, "no kernel of a GPU knows groups in fp32"
    efficient_basd: Tensor = _aten._scaled_dot_product_efficient_attention(
        q_basd, k_bgsd, v_bgsd, None, True, dropout_p, is_causal, scale=scale
    )[0]
    return efficient_basd


class _Event:
    """In place of ``torch.cuda.Event``, once a subclass says whose it is."""

    gpu: "PretendedGpu"

    def __init__(self, enable_timing: bool = False) -> None:
        self._timed = enable_timing
        self.mark: Mark | None = None

    def record(self, stream: "_Stream | None" = None) -> None:
        self.mark = self.gpu.streams.mark(_name(self.gpu, stream))

    def wait(self, stream: "_Stream | None" = None) -> None:
        assert self.mark is not None, "the event was not recorded"
        self.gpu.streams.wait(_name(self.gpu, stream), self.mark)

    def synchronize(self) -> None:
        assert self.mark is not None, "the event was not recorded"
        self.gpu.host_waits("Event.synchronize", self.mark)

    def elapsed_time(self, later: "_Event") -> float:
        assert self._timed
        assert later._timed
        return 1.0


class _Stream(torch.Stream):
    """In place of ``torch.cuda.Stream``."""

    gpu: "PretendedGpu"

    def __new__(cls, gpu: "PretendedGpu", number: int) -> "_Stream":
        self = super().__new__(cls, stream_id=number, device_index=0, device_type=_CUDA)
        self.gpu = gpu
        return self

    def __init__(self, *_: Any) -> None:
        """Nothing: ``__new__`` has done it."""

    def record_event(  # type: ignore[override]  # events are pretended as well
        self, event: _Event | None = None
    ) -> _Event:
        recorded: Any = event or torch.cuda.Event()
        recorded.record(self)
        return cast(_Event, recorded)

    def wait_event(  # type: ignore[override]  # events are pretended as well
        self, event: _Event
    ) -> None:
        event.wait(self)

    def wait_stream(  # type: ignore[override]  # the other is pretended as well
        self, other: "_Stream"
    ) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        mark = self.gpu.streams.mark(self.gpu.name(self.stream_id))
        self.gpu.host_waits("Stream.synchronize", mark)


def _name(gpu: "PretendedGpu", stream: _Stream | None) -> str:
    return gpu.current_stream() if stream is None else gpu.name(stream.stream_id)


def streams_and_events(gpu: "PretendedGpu") -> AbstractContextManager[Any]:
    """Return a context in which ``torch.cuda`` is about ``gpu``."""
    streams = {0: _Stream(gpu, 0)}

    def make(device: Any = None, priority: int = 0) -> _Stream:
        number = gpu.new_stream()
        return streams.setdefault(number, _Stream(gpu, number))

    def current(device: Any = None) -> _Stream:
        return streams[gpu.current_number()]

    @contextmanager
    def use(stream: _Stream) -> Iterator[None]:
        before = gpu.enter_stream(stream.stream_id)
        try:
            yield
        finally:
            gpu.enter_stream(before)

    def named(name: str) -> AbstractContextManager[None]:
        gpu.ranges.append(name)
        return nullcontext()

    return patch.multiple(
        torch.cuda,
        Stream=make,
        Event=type("Event", (_Event,), {"gpu": gpu}),
        stream=use,
        current_stream=current,
        synchronize=lambda device=None: gpu.host_waits(
            "torch.cuda.synchronize", gpu.streams.everything()
        ),
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: False,
        set_device=lambda device: None,
        manual_seed=lambda seed: None,
        get_device_capability=lambda device=None: (9, 0),
        nvtx=SimpleNamespace(range=named),
    )
