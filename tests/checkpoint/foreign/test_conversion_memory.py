"""A conversion needs the memory of a file, not that of the model."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import torch

pytest.importorskip("safetensors", reason="an extra: pip install safetensors")

from checkpoint.foreign.test_mutated_models import MODEL

from megatron.checkpoint.boxed import StreamedTensor
from megatron.checkpoint.foreign.layouts import tensor_shapes
from megatron.checkpoint.foreign.weights import write_weights

LARGE: Final = MODEL.replaced(
    num_layers=12,
    hidden_size=768,
    ffn_hidden_size=2048,
    num_attention_heads=6,
    num_query_groups=6,
    kv_channels=128,
    vocab_size=8000,
)
CONVERT: Final = """
import resource, sys
from megatron.commands.convert_checkpoint import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def grown(*words: object) -> float:
    """Convert in a process of its own; return the bytes that it held beyond its imports."""
    command = [sys.executable, "-c", CONVERT, *map(str, words)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return 1024 * float(done.stdout.split()[-1])


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_a_conversion_holds_a_part_of_the_model(tmp_path: Path) -> None:
    streamed = {
        f"weight.{name}": StreamedTensor(shape, torch.float32, partial(torch.ones, shape))
        for name, shape in tensor_shapes(LARGE).items()
    }
    write_weights(tmp_path / "ours", LARGE, streamed)
    out = grown("export", tmp_path / "ours", tmp_path / "theirs", "--max-shard-size", "20MB")
    size = sum(file.stat().st_size for file in (tmp_path / "theirs").glob("*.safetensors"))
    assert size > 350e6
    assert out < size / 4
    assert grown("import", tmp_path / "theirs", tmp_path / "again") < size / 4
