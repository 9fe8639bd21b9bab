"""The documentation builds as a site, all of whose links lead somewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=quiet, capture_output=True, text=True, check=False)


def test_every_link_leads_somewhere(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'src="images/1f1b_vocab.svg"' in start
    assert (tmp_path / "images" / "1f1b_vocab.svg").is_file()
    assert (tmp_path / "examples" / "own_text.sh").is_file()


def test_a_link_to_nowhere_fails(tmp_path: Path) -> None:
    for name in ("mkdocs.yml", "tools/docs_site.py", "docs/index.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "running.md" in done.stderr
