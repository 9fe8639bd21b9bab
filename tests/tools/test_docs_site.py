"""The documentation builds as a site, all of whose links lead somewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron.commands.exploring.export import PYODIDE_FILES

ROOT = Path(__file__).resolve().parents[2]


def build(root: Path, site: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(site)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"} | variables
    return subprocess.run(command, cwd=root, env=quiet, capture_output=True, text=True, check=False)


def test_every_link_leads_somewhere(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "explore").exists()
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


def test_the_site_has_the_schedule_explorer_where_it_is_asked_for(tmp_path: Path) -> None:
    pyodide, root = tmp_path / "pyodide", tmp_path / "root"
    pyodide.mkdir()
    for name in PYODIDE_FILES:
        (pyodide / name).touch()
    (root / "docs").mkdir(parents=True)
    (root / "docs" / "index.md").write_text("# Start\n")
    hook = ROOT / "tools" / "docs_site.py"
    (root / "mkdocs.yml").write_text(f"site_name: one page\nhooks: [{hook}]\n")
    for package in ("tools", "megatron"):
        (root / package).symlink_to(ROOT / package)
    done = build(root, tmp_path / "site", DOCS_EXPLORER=str(pyodide))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "explore" / "python.zip").is_file()
