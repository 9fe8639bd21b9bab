"""Fields and layouts of families with LayerNorms, or with an MLP without a gate."""

from collections.abc import Mapping
from typing import Final

from megatron.checkpoint.foreign.family import Values
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import Layout, Same
from megatron.model.settings import ModelSettings

_FUNCTIONS: Final = {
    "gelu": "exact_gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
"""Our names of activation functions without a gate, by the names of ``config.json``."""

_WRITTEN: Final = {
    "exact_gelu": "gelu",
    "gelu": "gelu_pytorch_tanh",
    "relu": "relu",
    "squared_relu": "relu2",
}


def read_function(c: Fields, name: str, default: str) -> Values:
    """Return the activation function of an MLP without a gate.

    Args:
        c: fields of ``config.json``.
        name: field that names the function.
        default: the function if the field is left out.
    """
    c.check(name, tuple(_FUNCTIONS), default)
    return {"activation": _FUNCTIONS[c.any(name, default)]}


def written_function(model: ModelSettings) -> str:
    """Return the word of ``config.json`` for the MLP's function; "none" of a function with a gate.

    No family reads "none".
    """
    return _WRITTEN.get(model.mlp.activation, "none")


def read_dropout(c: Fields, name: str, other: str, default: float) -> Values:
    """Return the dropout of branches and of the embedding, which is one number here.

    Args:
        c: fields of ``config.json``.
        name: field with the dropout of branches.
        other: field with the dropout of the embedding.
        default: value of both fields if they are left out.
    """
    of_branches = c.share(name, default)
    if c.share(other, default) != of_branches:
        raise c.fault(other, f"{name} {of_branches:g}, and this program has one dropout for both")
    return {"hidden_dropout": of_branches}


def named(names: Mapping[str, str]) -> dict[str, Layout]:
    """Return the layouts of parts whose weights and biases are the same in both programs.

    Args:
        names: their names of linear layers and norms by our names.
    """
    return {
        f"{ours}.{kind}": Same(f"{theirs}.{kind}")
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }
