"""Compiles the C++ of a checkout beside its sources, where every later start finds it.

    python -m megatron.native.build

``tools/setup_venv.sh`` and ``pretrain_gpt.sh`` run it beside other work. What is compiled already
takes no time. Where the sources' folder cannot be written, or there is no compiler, the first start
goes on without: it compiles into the cache, or takes the slower versions in Python.
"""

import sys
from collections.abc import Sequence
from typing import Final

from megatron.native.compile import reason
from megatron.native.extensions import EXTENSIONS, LOAD_ERRORS, Extension, load_extension
from megatron.native.slow_work import while_it_lasts

TELL_EVERY: Final = 8.0
"""Seconds between two lines of a compilation that goes on."""


def build(extensions: Sequence[Extension] = EXTENSIONS, tell_every: float = TELL_EVERY) -> bool:
    """Compile ``extensions`` beside their sources, one after the other, and say so on stderr.

    Returns:
        Whether all of them can be loaded.
    """
    done = [_built(extension, tell_every) for extension in extensions]
    return all(done)


def _built(extension: Extension, tell_every: float) -> bool:
    name = extension.source.name

    def tell(seconds: float) -> None:
        _say(f"compiling {name}, once per machine: {seconds:.0f} s so far")

    try:
        with while_it_lasts(tell, tell_every, tell_every):
            try:
                load_extension(extension, extension.source.parent)
            except OSError:  # a folder of sources that cannot be written: ranks take the cache
                load_extension(extension)
    except LOAD_ERRORS as error:
        _say(f"{name} is not compiled, slower code takes its place: {reason(error)}")
        return False
    return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    build()
