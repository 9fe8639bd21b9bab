"""RoPE in a ``config.json``: one set of fields for all layers, or one for each kind of layer."""

from typing import Any, Final

from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.layers.rope import Llama3Scaling
from megatron.model.config import ModelConfig

_LARGEST_BASE: Final = 10**12

Values = dict[str, Any]


def read_rotation(c: Fields, base: int = 10000) -> Values:
    """Return the fields of our model about the rotation of queries and keys.

    Version 5 of ``transformers`` writes ``rope_parameters``; older versions write ``rope_theta``
    and ``rope_scaling``.

    Args:
        c: fields of ``config.json``.
        base: default of the RoPE theta.

    Raises:
        ForeignError: the rotation is scaled in a way that this program does not support.
    """
    scaling = c.part("rope_parameters") or c.part("rope_scaling")
    theta = scaling if scaling is not None and "rope_theta" in scaling else c
    found: Values = {
        "position_embedding_type": "rope",
        "rotary_base": theta.whole("rope_theta", base, _LARGEST_BASE),
    }
    c.check("partial_rotary_factor", (1.0, 1), 1.0)
    if scaling is not None:
        scaling.check("partial_rotary_factor", (1.0, 1), 1.0)
        found |= _scaling(scaling)
    return found


def _scaling(scaling: Fields) -> Values:
    kind = scaling.any("rope_type", scaling.any("type", "default"))
    if kind == "default":
        return {}
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": scaling.whole("factor")}
    if kind != "llama3":
        raise ForeignError(
            f"{scaling.origin} is of the type {str(kind)[:40]!r}, and this program has only "
            "'default', 'linear' and 'llama3'"
        )
    fixed = Llama3Scaling()
    for name, value in (
        ("low_freq_factor", fixed.low_freq_factor),
        ("high_freq_factor", fixed.high_freq_factor),
        ("original_max_position_embeddings", fixed.original_length),
    ):
        if scaling.number(name) != value:
            raise ForeignError(
                f"{scaling.origin}: {name} is {scaling.any(name)}, and this program has only "
                f"{value:g}, as Llama 3.1 has"
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor", least=1.0)}


def write_rotation(model: ModelConfig) -> Values:
    """Return the fields of ``config.json`` that ``read_rotation`` reads, by their older names.

    Every version of ``transformers`` knows the older names.
    """
    written: Values = {"rope_theta": float(model.rotary_base)}
    if model.use_rope_scaling:
        fixed = Llama3Scaling()
        written["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": fixed.low_freq_factor,
            "high_freq_factor": fixed.high_freq_factor,
            "original_max_position_embeddings": fixed.original_length,
        }
    elif model.rotary_seq_len_interpolation_factor != 1:
        factor = float(model.rotary_seq_len_interpolation_factor)
        written["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return written
