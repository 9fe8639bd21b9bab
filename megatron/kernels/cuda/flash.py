"""Attention by the package flash-attn where it is installed: version 3 on Hopper, else 2.

PyTorch's own kernels have no cap and no ALiBi, and no windows for fp32 or dropout. Without
flash-attn such scores are computed block by block (``reference.scored_attention``). Version 3 is
also quicker than PyTorch for *plain* scores, which have none of these. Version 2 is made for
Ampere: on newer GPUs cuDNN's attention, which is about twice as fast there, computes plain scores
(``attention_parts``). Neither version is required. Attention that no installed version can compute
goes to PyTorch.

Where ranks share a sequence, there may be queries of the last positions only. Since version 2.1 the
package aligns the last query with the last key, and counts causality, window and ALiBi from there.

Shapes: b batch, a query heads, g key/value heads, s sequence, d channels of a head, n = b s.
"""

import importlib
import logging
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.cuda.attention_parts import knows_seen, takes_cudnn
from megatron.kernels.reference.scored_attention import slopes_on

Version = Literal[2, 3]

_MODULES: Final[dict[Version, str]] = {3: "flash_attn_interface", 2: "flash_attn"}
_CAPABILITIES: Final[dict[Version, range]] = {3: range(9, 10), 2: range(8, 1000)}
"""The major compute capabilities of GPUs that each version runs on."""

_COMPUTED: Final[dict[Version, frozenset[str]]] = {
    3: frozenset({"softcap", "window", "documents"}),
    2: frozenset({"softcap", "window", "documents", "slopes_a", "dropout"}),
}
"""The properties of ``AttentionOptions`` that each version computes."""

_WORDS: Final = {
    "sinks_a": "attention sinks",
    "dropout": "dropout (version 2 does)",
    "slopes_a": "ALiBi (version 2 does)",
}

_WIDEST_HEAD, _CHANNELS_AT_ONCE = 256, 8
_TYPES: Final = (torch.bfloat16, torch.float16)

_LOG = logging.getLogger(__name__)


class FlashAttention:
    """Causal attention by one version of the package.

    Args:
        version: version of the package.
        module: the package's module that has the functions.
        prefers_cudnn: whether cuDNN computes attention with plain scores faster than this version.
    """

    def __init__(self, version: Version, module: Any, *, prefers_cudnn: bool = False) -> None:
        self.version = version
        self._prefers_cudnn = prefers_cudnn
        self._dense: Callable[..., Any] = module.flash_attn_func
        self._packed: Callable[..., Any] = module.flash_attn_varlen_func

    def refusal(self, q_basd: Tensor, k_bgsd: Tensor, options: AttentionOptions) -> str | None:
        """Return the reason why this version does not compute this attention, or ``None``."""
        channels, documents = q_basd.shape[3], options.documents
        if lacking := options.asked - _COMPUTED[self.version]:
            return " and ".join(_WORDS.get(name, name) for name in sorted(lacking))
        if self._prefers_cudnn and not options.asked and knows_seen(q_basd, k_bgsd):
            return "the speed of cuDNN on this GPU"
        if q_basd.dtype not in _TYPES:
            return f"{q_basd.dtype} (it has bf16 and fp16)"
        if channels > _WIDEST_HEAD or channels % _CHANNELS_AT_ONCE:
            return f"heads of {channels} channels (a multiple of 8, at most 256)"
        if options.asked >= {"dropout", "softcap"}:
            return "dropout of scores that are capped"
        if documents is not None and not documents.are_of(q_basd, k_bgsd):
            return "documents of which ranks share the positions"
        return None

    def attend(
        self, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
    ) -> Tensor:
        """See ``Kernels.causal_attention``."""
        heads = [t.transpose(1, 2) for t in (q_basd, k_bgsd, v_bgsd)]
        given, documents = self._given(q_basd, options), options.documents
        if documents is None:
            out_bsad = _first(self._dense(*heads, **given))
        else:
            out_nad = _first(
                self._packed(
                    *(t.flatten(0, 1) for t in heads),
                    cu_seqlens_q=documents.bounds_k,
                    cu_seqlens_k=documents.bounds_k,
                    max_seqlen_q=documents.longest,
                    max_seqlen_k=documents.longest,
                    **given,
                )
            )
            out_bsad = out_nad.unflatten(0, (len(q_basd), -1))
        return out_bsad.transpose(1, 2)

    def _given(self, q_basd: Tensor, options: AttentionOptions) -> dict[str, Any]:
        """Return the options by the names of the package's arguments."""
        scores = options.scores
        given: dict[str, Any] = {
            "softmax_scale": scores.scale_of(q_basd.shape[3]),
            "causal": True,
            "window_size": (-1, -1) if scores.window is None else (scores.window, 0),
            "softcap": scores.softcap,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if self.version == 2:
            given |= {"dropout_p": options.dropout, "alibi_slopes": None}
            if scores.slopes_a:
                slopes_a = slopes_on(scores.slopes_a, q_basd.device, torch.float32)
                given["alibi_slopes"] = slopes_a
        return given


def find_flash_attention(device: torch.device) -> tuple[FlashAttention, ...]:
    """Return the installed versions that run on a GPU, the quickest first; the log names them.

    Args:
        device: where attention is computed; a device that is no GPU has no versions.
    """
    if device.type != "cuda":
        return ()
    found: list[FlashAttention] = []
    for version, name in _MODULES.items():
        module = _imported(name)
        if module is None:
            continue
        major, _ = torch.cuda.get_device_capability(device)
        if major in _CAPABILITIES[version]:
            slower = version == 2 and takes_cudnn(device)
            found.append(FlashAttention(version, module, prefers_cudnn=slower))
    if found:
        names = " and ".join(str(each.version) for each in found)
        _LOG.info("attention: flash-attn %s, and PyTorch's own for the rest", names)
    else:
        _LOG.info("attention: PyTorch's own; no flash-attn for this GPU is installed")
    return tuple(found)


def _imported(name: str) -> Any:
    """Return a module, or ``None`` if it is not there or was built for another PyTorch."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError) as error:
        _LOG.warning("attention: %s is installed, but does not load: %s", name, error)
        return None


def _first(result: Any) -> Tensor:
    """Return the output; older releases of version 3 return statistics beside it."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
