"""RoPE in a ``config.json``: one set of fields for all layers, or one for each kind of layer."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.flags.ranges import THETA
from megatron.layers.rope_scaling import (
    DynamicScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
    length_factor,
)
from megatron.model.settings import ModelSettings

LARGEST_BASE: Final = THETA.most
"""The largest RoPE theta that is read."""

_PARTIAL: Final = "partial_rotary_factor"

Values = dict[str, Any]


def read_rotation(c: Fields, base: int = 10000, *, share: float | None = None) -> Values:
    """Return the fields of our model about the rotation of queries and keys.

    Version 5 of ``transformers`` writes ``rope_parameters``; older versions write ``rope_theta``
    and ``rope_scaling``. Where both are given, ``rope_scaling`` counts.

    Args:
        c: fields of ``config.json``.
        base: default of the RoPE theta.
        share: default of the share of a head's channels that turn; ``None``: all channels turn in
            every model of the family.

    Raises:
        ForeignError: the rotation is scaled in a way that this program does not support.
    """
    scaling = scaling_of(c)
    theta = scaling if scaling is not None and "rope_theta" in scaling else c
    found: Values = {
        "position_embedding_type": "rope",
        "rotary_base": read_base(theta, "rope_theta", base),
    }
    if share is None:
        c.check(_PARTIAL, (1.0, 1, None), 1.0)
    else:
        found["rotary_percent"] = _share_of(c, scaling, share)
    if scaling is not None:
        if share is None:
            scaling.check(_PARTIAL, (1.0, 1), 1.0)
        found |= _READERS[_kind_of(scaling)](scaling, c)
    _check_scaled(c, found)
    if found.get("rope_type") == "yarn" and found["rotary_base"] == 1:
        raise theta.fault("rope_theta", "more than 1, as YaRN needs it")
    return found


def read_base(c: Fields, name: str, default: int | None = None) -> float:
    """Return a field that holds a theta; a default of ``None``: the field must be there."""
    if default is None:
        return c.number(name, least=THETA.least, most=LARGEST_BASE)
    return c.number(name, default, THETA.least, LARGEST_BASE)


def _check_scaled(c: Fields, rotation: Values) -> None:
    """Refuse a scaling that differs from pair to pair if it does not fit the number of pairs."""
    kind, share = rotation.get("rope_type"), rotation.get("rotary_percent", 1.0)
    if kind is None:
        return
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    width = c.whole("head_dim", max(hidden // heads, 1))
    pairs = int(width * share) // 2
    turned = (
        f"{pairs} pairs of channels of a head turn (hidden_size {hidden}, num_attention_heads "
        f"{heads}, head_dim {width}, {_PARTIAL} {share:g})"
    )
    if pairs == 1:
        raise ForeignError(
            f"{c.origin}: rope_type {kind} scales some pairs and not others, and {turned}"
        )
    for name in ("short", "long") if kind == "longrope" else ():
        count = len(rotation[f"rope_{name}_factors"])
        if count != pairs:
            raise ForeignError(f"{c.origin}: {name}_factor has {count} numbers, and {turned}")


def _share_of(c: Fields, scaling: Fields | None, default: float) -> float:
    """Return the share of a head's channels that turn.

    Raises:
        ForeignError: the share makes no even number of channels.
    """
    where = scaling if scaling is not None and _PARTIAL in scaling.all else c
    if where.is_null(_PARTIAL):
        raise where.fault(_PARTIAL, "a number")
    share = where.number(_PARTIAL, default)
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    width = c.whole("head_dim", max(hidden // heads, 1))
    turned = int(width * share)
    if share > 1 or turned < 2 or turned % 2:
        raise where.fault(
            _PARTIAL, f"a share of a head's {width} channels (head_dim) that makes an even number"
        )
    return share


def read_two_rotations(c: Fields, base: int, local: Callable[[], float]) -> tuple[Values, float]:
    """Return the rotation of layers without a window, and the theta of layers with the window.

    ``rope_parameters`` have fields for both kinds of layers. The older ``rope_theta`` and
    ``rope_scaling`` are about layers without a window.

    Args:
        c: fields of ``config.json``.
        base: default of the theta of layers without a window.
        local: returns the theta of layers with the window if ``rope_parameters`` do not tell it.

    Raises:
        ForeignError: a field is damaged, or the rotation is scaled in a way that this program does
            not support.
    """
    kinds = c.part("rope_parameters") or Fields({}, c.origin)
    if others := sorted(kinds.all.keys() - {"full_attention", "sliding_attention"}):
        raise ForeignError(
            f"{kinds.origin} has {others[0]} beside full_attention and sliding_attention, and "
            "transformers reads past it in such models: put it into one of them"
        )
    older, near = c.part("rope_scaling"), kinds.part("sliding_attention")
    whole = kinds.part("full_attention") or Fields({}, c.origin)
    own = dict(whole.all) | ({} if older is None else dict(older.all))
    Fields(own, whole.origin).check("truncate", (True,), True)  # transformers reads past false
    own.setdefault("rope_theta", c.any("rope_theta", base))
    names = "max_position_embeddings", "hidden_size", "num_attention_heads", "head_dim", _PARTIAL
    outer = {name: c.any(name, None) for name in names}
    rotation = read_rotation(Fields({**outer, "rope_parameters": own}, c.origin))
    if near is not None:
        near.check("rope_type", ("default",), near.any("type", "default"))
        near.check(_PARTIAL, (1.0, 1), 1.0)
    if near is not None and "rope_theta" in near:
        return rotation, read_base(near, "rope_theta")
    return rotation, local()


def scaling_of(c: Fields) -> Fields | None:
    """Return the fields of a ``config.json`` about the scaling of RoPE; ``None``: it has none."""
    older = c.part("rope_scaling")
    return older if older is not None and older.all else c.part("rope_parameters")


def _kind_of(scaling: Fields) -> str:
    kind: str = scaling.any("rope_type", scaling.any("type", "default"))
    if kind not in _READERS:
        raise ForeignError(
            f"{scaling.origin} is of the type {str(kind)[:40]!r}, and this program has only "
            f"{', '.join(_READERS)}"
        )
    return kind


def read_latent_rotation(c: Fields) -> Values:
    """Return the fields of our model by which multi-latent attention multiplies all scores.

    ``transformers`` multiplies scores by the square of YaRN's length for ``mscale_all_dim``,
    whatever the type of scaling is, but for ``default``. YaRN's rotated channels are shortened by
    the same length only if ``mscale`` is given too. Without ``mscale`` they have the length
    1 + L, where L is 0.1 log(``factor``), and our model has the ``mscale`` m with
    (1 + m L) / (1 + a L) = 1 + L for a = ``mscale_all_dim``, which is m = 1 + a + a L.

    Raises:
        ForeignError: a field is damaged.
    """
    scaling = scaling_of(c)
    kind = "default" if scaling is None else _kind_of(scaling)
    if scaling is None or kind == "default":
        return {}
    weight = scaling.number("mscale_all_dim", 0.0)
    if not weight:
        return {}
    factor = scaling.number("factor", least=1.0)
    found: Values = {"rotary_scaling_factor": factor, "mscale_all_dim": weight}
    if kind == "yarn" and not scaling.number("mscale", 0.0):
        found["mscale"] = 1.0 + weight * length_factor(factor, 1.0)
    return found


def _read_default(scaling: Fields, c: Fields) -> Values:
    return {}


def _read_linear(scaling: Fields, c: Fields) -> Values:
    return {"rotary_seq_len_interpolation_factor": scaling.whole("factor")}


def _read_llama3(scaling: Fields, c: Fields) -> Values:
    fixed = Llama3Scaling()
    for name, found, value in (
        ("low_freq_factor", scaling.number("low_freq_factor"), fixed.low_freq_factor),
        ("high_freq_factor", scaling.number("high_freq_factor"), fixed.high_freq_factor),
        ("original_max_position_embeddings", _original_length(scaling, c), fixed.original_length),
    ):
        if found != value:
            raise ForeignError(
                f"{scaling.origin}: {name} is {found:g}, and this program has only {value:g}, as "
                "Llama 3.1 has"
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor", least=1.0)}


def _read_dynamic(scaling: Fields, c: Fields) -> Values:
    """``max_position_embeddings`` are the tokens up to which nothing is scaled."""
    return {
        "rope_type": "dynamic",
        "rotary_scaling_factor": scaling.number("factor", least=1.0),
        "original_max_position_embeddings": c.whole("max_position_embeddings"),
    }


def _original_length(scaling: Fields, c: Fields) -> int:
    """Return the tokens of a sample in the original training: the outer field counts first."""
    name = "original_max_position_embeddings"
    if name in c:
        return c.whole(name)
    return scaling.whole(name, c.any("max_position_embeddings", None))


def _read_yarn(scaling: Fields, c: Fields) -> Values:
    """Rotated channels have ``mscale`` and ``mscale_all_dim`` only if both are given and not 0."""
    weights = [scaling.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    mscale, all_dim = weights if all(weights) else (1.0, 0.0)
    is_rounded = scaling.truth("truncate", True)
    found = YarnScaling(
        scaling.number("factor", least=1.0),
        _original_length(scaling, c),
        scaling.number("beta_fast", 32.0) or 32.0,
        scaling.number("beta_slow", 1.0) or 1.0,
        mscale,
        all_dim,
        not is_rounded,
    )
    if found.beta_fast < found.beta_slow:
        raise ForeignError(
            f"{scaling.origin}: beta_fast {found.beta_fast:g} is less than beta_slow "
            f"{found.beta_slow:g}"
        )
    given = scaling.number("attention_factor", found.magnitude)
    if abs(given - found.magnitude) > 1e-6:
        raise ForeignError(
            f"{scaling.origin}: attention_factor is {given:g}, and this program has only "
            f"{found.magnitude:g}, which follows from factor, mscale and mscale_all_dim"
        )
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": found.factor,
        "original_max_position_embeddings": found.original_length,
        "beta_fast": found.beta_fast,
        "beta_slow": found.beta_slow,
        "mscale": found.mscale,
        "mscale_all_dim": found.mscale_all_dim,
        "yarn_exact_range": found.exact_range,
    }


def _read_longrope(scaling: Fields, c: Fields) -> Values:
    """``factor`` follows from two lengths where it is left out."""
    original, length = _original_length(scaling, c), c.whole("max_position_embeddings")
    factor = scaling.number("factor", length / original)
    found = LongRopeScaling(factor, original, ())
    if original == 1:
        raise scaling.fault("original_max_position_embeddings", "more than 1, as longrope needs it")
    given = scaling.number("attention_factor", found.magnitude)
    if abs(given - found.magnitude) > 1e-6:
        raise ForeignError(
            f"{scaling.origin}: attention_factor is {given:g}, and this program has only "
            f"{found.magnitude:g}, which follows from factor, original_max_position_embeddings and "
            "max_position_embeddings"
        )
    return {
        "rope_type": "longrope",
        "rotary_scaling_factor": max(factor, 1.0),
        "original_max_position_embeddings": original,
        "rope_short_factors": _divisors(scaling, "short_factor"),
        "rope_long_factors": _divisors(scaling, "long_factor"),
    }


def _divisors(scaling: Fields, name: str) -> tuple[float, ...]:
    given: Any = scaling.any(name)
    wanted = "a list of numbers of at least 0.0001"
    if not isinstance(given, list):
        raise scaling.fault(name, wanted)
    each = [Fields({name: one}, scaling.origin) for one in given]
    return tuple(own.number(name, least=1e-4) for own in each)


_READERS: Final[Mapping[Any, Callable[[Fields, Fields], Values]]] = {
    "default": _read_default,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "llama3": _read_llama3,
}
"""For each type of scaling, the function that reads it from its fields and the model's fields."""


def write_rotation(model: ModelSettings) -> Values:
    """Return the fields of ``config.json`` that ``read_rotation`` reads, by their older names.

    Every version of ``transformers`` knows the older names.
    """
    written: Values = {"rope_theta": float(model.positions.rotary_base)}
    scaling = _written_scaling(model)
    if scaling and model.latent.multi_latent_attention and model.rope_scaling.mscale_all_dim:
        scaling["mscale_all_dim"] = model.rope_scaling.mscale_all_dim
    return written | ({"rope_scaling": scaling} if scaling else {})


def _written_scaling(model: ModelSettings) -> Values:
    scaling = model.rope_scaling.scaling(model.seq_length)
    if isinstance(scaling, DynamicScaling):
        return {"rope_type": "dynamic", "factor": scaling.factor}
    if isinstance(scaling, YarnScaling):
        return {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": not scaling.exact_range,
            **_written_magnitude(scaling),
        }
    if isinstance(scaling, LongRopeScaling):
        return {
            "rope_type": "longrope",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_length,
            "short_factor": list(model.rope_scaling.rope_short_factors),
            "long_factor": list(model.rope_scaling.rope_long_factors),
        }
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
        }
    if model.positions.rotary_seq_len_interpolation_factor != 1:
        factor = float(model.positions.rotary_seq_len_interpolation_factor)
        return {"rope_type": "linear", "factor": factor}
    return {}


def _written_magnitude(scaling: YarnScaling) -> Values:
    """Return YaRN's ``mscale`` and ``mscale_all_dim``, unless both are as in its paper."""
    if (scaling.mscale, scaling.mscale_all_dim) == (1.0, 0.0):
        return {}
    return {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
