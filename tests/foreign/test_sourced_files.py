"""Files that a script sources are read as bash reads them; nothing of them is run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.foreign.faults import ScriptError
from megatron.foreign.read import read_source
from megatron.foreign.walk import Script, read_script

STAND_IN = 'torchrun() { printf "%s\\0" "$@"; }\n'
LINE = "torchrun pretrain_gpt.py --num-layers 1 --lr 1 "

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not there")


def write(folder: Path, **files: str) -> Path:
    """Write files, of which a double underline in the name stands for a folder."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.sh"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "train.sh"


def read(path: Path, **given: str) -> Script:
    return read_script(path.read_text(), given, path)


def words(script: Script) -> list[str]:
    (launch,) = script.launches
    return list(map(script.holes.shown, launch.words[4:]))


def by_bash(path: Path) -> list[str]:
    """The words behind --lr 1 as bash makes them, which stands in the folder of the script."""
    path.write_text(STAND_IN + path.read_text())
    done = subprocess.run(
        ["bash", path], env={}, capture_output=True, text=True, check=False, cwd=path.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[5:-1]


CASES = {
    "variables": {
        "train": f"A=1\nsource env.sh\n{LINE}$A ${{B[@]}}",
        "env": "A=2\nB=(--tie 'a b')",
    },
    "a dot": {"train": f". ./common.sh\n{LINE}$A", "common": "export A=3"},
    "nested": {
        "train": f"source conf/a.sh\n{LINE}$A $B",
        "conf__a": "source conf/b.sh\nA=$B-a",
        "conf__b": "B=b",
    },
    "twice": {"train": f"source env.sh\nsource env.sh\n{LINE}$A", "env": "A=${A}x"},
    "functions": {
        "train": f"source lib.sh\nadd --one\nadd --two\n{LINE}$ARGS",
        "lib": 'add() {\n ARGS="$ARGS $1"\n}',
    },
    "arguments": {
        "train": f"set -- x\nsource env.sh 8 b\n{LINE}$A $1",
        "env": "A=$1-$2",
    },
    "a return ends the file": {
        "train": f"B=0\nsource env.sh\n{LINE}$A $B",
        "env": "A=1\nreturn\nA=2\nB=2",
    },
    "a guard": {
        "train": f"A=0\nsource env.sh\nsource env.sh\n{LINE}$A",
        "env": '[ -n "$LOADED" ] && return 0\nLOADED=1\nA=${A}x',
    },
    "an exit ends the script": {
        "train": f"{LINE}--first\nsource env.sh\n{LINE}--never",
        "env": "exit 0",
    },
    "a test of the file": {
        "train": "if [ -f env.sh ]; then\n source env.sh\nfi\n"
        f"[[ -e b.sh ]] && . b.sh\n{LINE}$A $B",
        "env": "A=1",
        "b": "B=2",
    },
    "the training itself": {"train": "A=7\nsource launch.sh", "launch": f"{LINE}$A"},
    "within a function": {
        "train": f"A=0\nload() {{\n local A=1\n source env.sh\n}}\nload\n{LINE}$A.$B",
        "env": "A=2\nB=3",
    },
    "a shell of its own": {"train": f"A=1\n(source env.sh)\n{LINE}$A", "env": "A=2"},
    "by eval": {"train": f"F=env.sh\neval source $F\n{LINE}$A", "env": "A=2"},
}


@needs_bash
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_words_are_those_of_bash(case: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path, **case)
    assert words(read(path)) == by_bash(path)


FOLDERS = (
    "$(dirname $0)",
    '$(dirname "$0")',
    '"$(dirname -- "${BASH_SOURCE[0]}")"',
    "${BASH_SOURCE%/*}",
    '$(cd "$(dirname "$0")" && pwd)',
    '$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd )',
    '$(cd $(dirname ${BASH_SOURCE[0]}); pwd -P)',
    '$(dirname "$(readlink -f "$0")")',
    '$(realpath $(dirname "${BASH_SOURCE[0]:-$0}"))',
    "$(pwd)",
    "$PWD",
)  # fmt: skip


@needs_bash
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("form", ["source {}/conf/env.sh", "HERE={}\n. $HERE/conf/env.sh"])
def test_the_folder_of_the_script_is_understood_as_scripts_write_it(
    folder: str, form: str, tmp_path: Path
) -> None:
    path = write(tmp_path, train=f"{form.format(folder)}\n{LINE}$A", conf__env="A=1")
    found = words(read(path))
    path.write_text("export PATH=/usr/bin:/bin\n" + path.read_text())
    assert found == by_bash(path) == ["1"]


def test_files_are_looked_for_beside_the_script_beside_the_file_and_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path / "jobs",
        train=f"source conf/a.sh\n{LINE}$A $B $C",
        conf__a="A=a\nsource beside.sh\nsource here.sh",
        conf__beside="B=b",
    )
    write(tmp_path / "home", here="C=c", conf__a="A=not\n")
    monkeypatch.chdir(tmp_path / "home")
    assert words(read(path)) == ["a", "b", "c"]


def test_notes_name_the_files_and_their_lines_in_the_order_of_the_script(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        train=f"A=1\nsource env.sh\nif true; then B=2; fi\n{LINE}$A",
        env="\nif false; then A=2; fi\nsource gone.sh",
    )
    env = tmp_path / "env.sh"
    gone = f"there is no such file in {tmp_path}"
    script = read(path)
    told = [note for note in script.notes if "gone.sh" not in note]
    assert told == [
        f"line 2: source {env}: read",
        f"{env}, line 2: if false: false, its branch is left out",
        "line 3: if true: true, its branch is read",
    ]
    [missing] = [note for note in script.notes if "gone.sh" in note]
    assert missing.startswith(f"{env}, line 3: source gone.sh: not read ({gone}")
    assert missing.endswith("its variables are given by --set NAME=VALUE")
    assert script.others == ("gone.sh",)
    assert script.launches[0].line == 4


def test_a_training_in_a_sourced_file_has_the_line_of_the_script(tmp_path: Path) -> None:
    path = write(tmp_path, train="\n\nsource launch.sh", launch=f"#\n#\n#\n#\n{LINE}")
    assert [launch.line for launch in read(path).launches] == [3]


def test_what_is_given_counts_in_place_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, train=f"source env.sh\n{LINE}$A $B", env="A=1\nB=$A")
    script = read(path, A="8")
    assert words(script) == ["8", "8"]
    assert not any("the script has no" in note for note in script.notes)


def test_a_variable_that_only_a_file_names_is_known_to_set(tmp_path: Path) -> None:
    path = write(tmp_path, train=f"source env.sh\n{LINE}", env="[ x$C = xy ] && D=1")
    assert not any("the script has no" in note for note in read(path, C="y").notes)


@pytest.mark.parametrize(
    ("files", "way"),
    [
        ({"train": "source train.sh"}, ["train", "train"]),
        ({"train": "source a.sh", "a": "A=1\nsource b.sh", "b": "source ./a.sh"}, ["a", "b", "a"]),
    ],
)
def test_a_cycle_is_refused_with_its_way(
    files: dict[str, str], way: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path, **files)
    told = " > ".join(str(tmp_path / f"{name}.sh") for name in way)
    with pytest.raises(ScriptError, match=re.escape(f"reads itself ({told})")):
        read(path)


def test_a_file_whose_name_is_not_known_is_told(tmp_path: Path) -> None:
    script = read(write(tmp_path, train=f"source $WHERE/env.sh\n{LINE}$A", env="A=1"))
    assert words(script) == ["$A"]
    [note] = script.notes
    assert note.startswith("line 1: source $WHERE/env.sh: not read; its variables are given by")
    given = read(tmp_path / "train.sh", WHERE=str(tmp_path))
    assert words(given) == ["1"]


def test_a_file_that_is_no_text_is_told_and_a_folder_is_no_file(tmp_path: Path) -> None:
    path = write(tmp_path, train=f"source zero.sh\nsource folder.sh\n{LINE}")
    (tmp_path / "zero.sh").write_bytes(b"A=1\0")
    (tmp_path / "folder.sh").mkdir()
    zero, folder = read(path).notes
    assert "zero.sh: not read" in zero
    assert "zero bytes" in zero
    assert "folder.sh: not read (there is no such file in" in folder


@pytest.mark.parametrize("fault", ["if true; then\n A=2\n", "A=2\necho 'open\n", "A=(2\n"])
def test_a_file_with_a_fault_is_told_and_what_it_may_assign_is_not_known(
    fault: str, tmp_path: Path
) -> None:
    text = f"A=0\nB=0\nC=0\nsource env.sh\n{LINE}$A $B $C"
    path = write(tmp_path, train=text, env=f"read -r B\n{fault}")
    script = read(path)
    assert words(script) == ["$A", "$B", "0"]
    env = tmp_path / "env.sh"
    read_note, given = script.notes
    assert re.match(rf"line 4: source {re.escape(str(env))}: not read \(line \d: ", read_note)
    assert given == (
        f"line 4: source {env}: not followed; give what it assigns by --set A=VALUE --set B=VALUE"
    )
    assert words(read(path, A="7", B="8")) == ["7", "8", "0"]


def test_a_fault_within_files_names_the_outermost_and_the_innermost(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        train="\nsource a.sh",
        a="#\n#\nsource b.sh",
        b="source c.sh",
        c="source d.sh",
        d="A=1\neval 'if true'",
    )
    told = f"train.sh: line 2: in {tmp_path}/a.sh, line 3: in {tmp_path}/d.sh, line 2: "
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        read_source(path, {})
    assert "b.sh" not in str(refused.value)
    assert "c.sh" not in str(refused.value)


def test_files_that_read_each_other_twice_end_at_a_limit(tmp_path: Path) -> None:
    files = {f"f{n}": f"source f{n + 1}.sh\nsource f{n + 1}.sh" for n in range(20)}
    path = write(tmp_path, train="source f0.sh", f20="A=1", **files)
    with pytest.raises(ScriptError, match="files are read more than 300 times") as refused:
        read(path)
    assert str(refused.value).count(": in ") == 2


def test_without_a_path_no_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, env="A=1")
    monkeypatch.chdir(tmp_path)
    script = read_script(f"source env.sh\n{LINE}$A")
    assert words(script) == ["$A"]
    assert script.others == ("env.sh",)


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    path = write(tmp_path, train=f"source env.sh\n{LINE}", env=f"touch {made}\nX=$(touch {made})")
    read(path)
    assert not made.exists()


def test_a_file_of_many_commands_exhausts_the_budget_of_the_script(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        train=f"for a in {' '.join(map(str, range(60)))}; do source env.sh; done\n{LINE}",
        env="A=1\n" * 2000,
    )
    with pytest.raises(ScriptError, match="more than 20,000 commands"):
        read(path)
