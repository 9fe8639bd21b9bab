"""Runs a count apart from the code that asks for it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from megatron.training.planning.count.no_compiler import no_compiler

T = TypeVar("T")


def apart(count: Callable[[], T]) -> T:
    """Return the result of ``count``, which runs in a thread of its own.

    PyTorch keeps its modes by thread: modes that change operations (such as one of tensors without
    data), gradients that are off, narrower types (autocast). None of the caller's modes holds in
    the new thread, so the count is the same within all of them. A count ends without an effect on
    PyTorch: dropout seeds the random generator without values too, so the generator gets its state
    back.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_without_effect, count).result()


def _without_effect(count: Callable[[], T]) -> T:
    state = torch.get_rng_state()
    try:
        with no_compiler():
            return count()
    finally:
        torch.set_rng_state(state)
