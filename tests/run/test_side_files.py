"""Files that flags name end in one line with the flag and the file, whatever is in them."""

import os
from pathlib import Path

import pytest

from megatron.run.command_line import parse

BASE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 4 --device cpu --tokenizer-type NullTokenizer --vocab-size 99"
)


@pytest.mark.parametrize(
    "flag",
    [
        "--per-split-data-args-path",
        "--data-args-path",
        "--train-weighted-split-paths-path",
        "--data-path corpus --deepspeed-config",
    ],
)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000, ""),
        (b"\xff\x00", "is no text: byte 1 of it is 0xff"),
        ("device", "is a device, not a file: give another file"),
        ("huge", "has more than .* bytes: give another file"),
        ("folder", "is a folder, not a file: give another file"),
    ],
    ids=["deep", "binary", "device", "huge", "folder"],
)
def test_what_cannot_be_read_is_told_in_one_line(
    flag: str, content: bytes | str, reason: str, tmp_path: Path
) -> None:
    path = Path("/dev/zero") if content == "device" else tmp_path / "file"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content == "huge":
        path.touch()
        os.truncate(path, 1 << 40)  # a hole, which takes no room on the disk
    with pytest.raises(ValueError, match=f"{flag.split()[-1]}.*{path}.*{reason}") as caught:
        parse([*BASE.split(), *flag.split(), str(path)], world_size=1)
    assert sum(str(path) in line for line in str(caught.value).splitlines()) == 1
