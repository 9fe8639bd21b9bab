"""The folder of an unfinished run: which files it may hold."""

from pathlib import Path

import pytest

from megatron.data.preparation.unfinished import held


@pytest.mark.parametrize("name", [".nfs00000000004c2d1a0000007b", ".DS_Store", "._0.bin"])
def test_a_file_that_the_system_leaves_is_no_fault(name: str, tmp_path: Path) -> None:
    """NFS names a removed file that is still open ``.nfs`` and hexadecimal digits."""
    own = tmp_path / "out.unfinished"
    own.mkdir()
    (own / name).write_text("")
    with held(own):
        assert (own / name).exists()
    (own / ".nfs-notes").write_text("dear to its owner")
    with pytest.raises(ValueError, match=r"holds \.nfs-notes, so it is no folder"), held(own):
        pass
