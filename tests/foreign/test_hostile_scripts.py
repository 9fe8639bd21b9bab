"""Scripts of strangers: nothing in them is run, nothing hangs, and a fault has one clear line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.commands import from_megatron
from megatron.foreign.faults import ScriptError
from megatron.foreign.judge import Job, judgement_of
from megatron.foreign.line import launch_text
from megatron.foreign.walk import read_script

LINE = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --lr 1e-4"
ROOT = Path(__file__).resolve().parents[2]


def refused(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error with which a file is refused."""
    with pytest.raises(SystemExit) as ended:
        from_megatron.main([str(path), *words])
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert told.err.startswith("error:")
    return told.err


def is_read_or_refused(text: str) -> bool:
    """Whether a text is read, or refused with the number of its line."""
    try:
        read_script(text)
    except ScriptError as error:
        return str(error).startswith("line ")
    return True


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"A='never closed\n{LINE}", "line 1: this quote ' is never closed"),
        (f'{LINE}\necho "a $(b) ', 'line 2: this quote " is never closed'),
        (f"{LINE} `hostname", "line 1: this quote ` is never closed"),
        (f"{LINE} $(hostname", "line 1: $( is never closed"),
        (f"{LINE} ${{A", "line 1: ${ is never closed"),
        (f"\nARGS=(--a\n{LINE}", "line 2: the bracket ( of this array is never closed"),
        (f"if [ $A = 1 ]; then\n{LINE}", "line 1: if has no fi"),
        (f"{LINE}\nfi", "line 2: fi stands where no block is open"),
        (f"{LINE}\nesac", "line 2: esac stands where no block is open"),
        ("for a in b; do\ntrue", "line 1: for has no done"),
        ("[[ $A == b", "line 1: [[ has no ]]"),
        (f"{LINE}\n| tee log", "line 2: | begins a command"),
        ("echo no training", "no training is started in it"),
        ("", "no training is started in it"),
        ("bash run_7b.sh 8", "it uses run_7b.sh: give that script"),
    ],
)
def test_a_script_that_is_no_script_is_refused_with_its_line(
    text: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(text)
    assert fault in refused(script, capsys)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("A=" + "x" * 1000 + "\n" + "A=$A$A\n" * 40, "has more than 1,000,000 characters"),
        ("A=aa\n" + "A=$A$A$A$A$A\n" * 40, "has more than 1,000,000 characters"),
        ('A="$A$B" B="$A$A x"\n' * 60, "characters"),
        ("f() { g; g; }\ng() { f; f; }\nf", "levels of calls"),
        ("f() { eval f; }\nf", "levels of calls"),
        ('A=\'eval "$A"\'\neval "$A"', "levels of calls"),
        ("true\n" * 30_000, "more than 20,000 commands"),
        ("for a in 1 2 3 4 5 6 7 8 9; do " * 9 + "true; " + "done; " * 9, "20,000 commands"),
        ("if true; then " * 100 + "true; " + "fi; " * 100, "levels of blocks"),
        ("{ " * 100_000, "levels of blocks"),
        ("( " * 300_000, "levels of blocks"),
        ("! " * 100_000 + "true", "levels of blocks"),
        ("f() " * 100_000 + "{ true; }", "levels of blocks"),
        ("echo " + "${A:-" * 1000 + "}" * 1000, "levels of ${...}"),
        ("A=(" + "x " * 100_000 + ")\n" + 'B="$B${A[*]}"\n' * 60, "characters"),
    ],
    ids=range(15),
)
def test_bombs_are_defused(text: str, fault: str) -> None:
    with pytest.raises(ScriptError, match=fault.replace("$", r"\$").replace("{", r"\{")):
        read_script(text)


@pytest.mark.parametrize(
    "text",
    [
        "A=$((9**9**9**9))",
        "A=$((" + "(" * 400 + "1" + ")" * 400 + "))",
        "A=$((1/0)) B=$((08)) C=$((x=1)) D=$(( $(id) ))",
        "A=" + "a" * 5000 + '\nB="${A%%*a*a*a*a*a*b}"',
        "A=" + "a" * 900 + '\nB="${A##*a*a*a*a*a*a*a*b}"',
        "((" * 200_000,
        "$((" * 3000 + "1",
        "case " + "a" * 900 + " in *a*a*a*a*a*a*b) true ;; esac",
        "A=('x' \"y\" [3]=z [k]=$(id)); B=${A[$(id)]} C=${!A} D=${A[@]:1:2} E=${A@Q}",
        "cat <<'EOF'\n" + "$(id) ' \" `\n" * 100 + "EOF\n",
        "cat <<EOF\nno end",
    ],
    ids=range(11),
)
def test_costly_and_odd_texts_are_read_or_refused_at_once(text: str) -> None:
    assert is_read_or_refused(f"{text}\n{LINE}")


def test_no_command_is_run_and_no_file_is_touched(tmp_path: Path) -> None:
    marker, script = tmp_path / "marker", tmp_path / "train.sh"
    touch = f"touch {marker}"
    script.write_text(
        f"""#!/bin/bash
set -e; {touch}; A=$({touch}) B=`{touch}` C=$(( $({touch}; echo 1) + 1 ))
echo ${{D:=$({touch})}} <({touch}) > {marker}
eval "{touch}"; bash -c '{touch}'; . {tmp_path}/other; exec 3> {marker}
trap '{touch}' EXIT
if {touch}; then {touch} & fi
python -c "open('{marker}', 'w')"
$({touch}) {LINE} --save "$({touch})" --hidden-size `{touch}` $A $(id) > {marker}
"""
    )
    (tmp_path / "other").write_text(touch)
    done = subprocess.run(
        [sys.executable, "tools/from_megatron.py", str(script)],
        cwd=ROOT,
        env={**os.environ, "BASH_ENV": str(tmp_path / "other")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--num-layers 8" in done.stdout
    assert {own.name for own in tmp_path.iterdir()} == {"train.sh", "other"}
    line = done.stdout.partition("the line to run:")[2].partition("with the vocabulary")[0]
    filled = line.replace("VALUE_1=", "VALUE_1=a").replace("VALUE_2=", "VALUE_2='b c'")
    ran = subprocess.run(
        ["bash", "-c", f'torchrun() {{ printf "%s\\n" "$@"; }}\n{filled}'],
        env={"TOKENIZER": "t", "DATA_PATH": "d"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "DATA_PATH" in ran.stderr, "the first variable that is left empty ends the line"
    assert {own.name for own in tmp_path.iterdir()} == {"train.sh", "other"}


def test_values_of_a_script_stay_values_in_the_line(tmp_path: Path) -> None:
    """Line ends, quotes, escapes and choices of strangers end no comment and no word."""
    marker = tmp_path / "marker"
    evil = f"x\n touch {marker}\n$(touch {marker})`touch {marker}`'\"\\é\x1b[31m\u202e!"
    quoted = "'" + evil.replace("'", "'\\''") + "'"
    script = read_script(
        f"E={quoted}\nif [ -f x ]; then S={quoted}; else S=$(date); fi\n"
        f'{LINE} --save "$E" --load "a$S$E" --tokenizer-model "$(x\ntouch {marker})" '
        "--data-path d --tokenizer-type T"
    )
    (launch,) = script.launches
    own = judgement_of(launch, Job(script.holes, launch.ranks))
    line = launch_text(own, own.as_is, script.holes)
    assert line.replace("\n", "").isprintable()
    run = re.sub(r"^([A-Z]\w*)= ", r"\1=v ", line, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", f'torchrun() {{ printf "%s\\0" "$@"; }}\n{run}'],
        env={"LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split("\0")
    assert words[words.index("--save") + 1] == evil
    assert words[words.index("--load") + 1] == f"av{evil}"
    assert not list(tmp_path.iterdir())


def test_no_file_is_read_that_a_script_names_by_an_at_sign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a word @FILE stands for a file of flags; in a script it is a value."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text("--wandb-project 73519\nkey-73519\n")
    script = tmp_path / "train.sh"
    script.write_text(
        f"{LINE} --wandb-exp-name @secret @secret --save @secret --load \"'@secret'\" "
        "--tokenizer-model @$SECRET --data-path 1 @secret --save=@secret --split @secret"
    )
    written, split = tmp_path / "as_is.sh", tmp_path / "split.sh"
    words = ["--output", str(written), "--output-split", str(split), "--predict", "H100"]
    from_megatron.main([str(script), *words, "--vocab-size", "100", "--nodes", "1"])
    from_megatron.main([str(script), "--json"])
    told = capsys.readouterr()
    assert "73519" not in told.out + told.err
    assert "left out: --wandb-exp-name @secret @secret: has a second value that" in told.out
    for line in (written.read_text(), split.read_text()):
        assert "--save=@secret" in line
        assert "--wandb-exp-name" not in line.replace("# ", "#").split("pretrain_gpt.py")[1]
        assert not re.search(r"(^|[\s\"'])@", re.sub("^#.*$", "", line, flags=re.MULTILINE))


def test_a_line_of_many_flags_is_answered_or_refused(tmp_path: Path) -> None:
    words = " ".join(f"--flag-{at}" for at in range(1001))
    script = read_script(f"{LINE} {words}")
    with pytest.raises(ValueError, match="more than 1,000 flags"):
        judgement_of(script.launches[0], Job(script.holes, script.launches[0].ranks))


def test_files_that_are_no_text_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large, binary, pipe = tmp_path / "large.sh", tmp_path / "binary.sh", tmp_path / "pipe.sh"
    with large.open("wb") as file:
        file.truncate(100_000_000)
    binary.write_bytes(b"\x7fELF\0\0\1" * 100)
    os.mkfifo(pipe)
    assert "has more than 1,048,576 bytes" in refused(large, capsys)
    assert "is no text: there are zero bytes in it" in refused(binary, capsys)
    assert "is a pipe" in refused(pipe, capsys)
    assert "folder" in refused(tmp_path, capsys)
    assert "/dev/zero" in refused(Path("/dev/zero"), capsys)
    assert "No such file" in refused(tmp_path / "missing.sh", capsys)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_and_encodings_do_not_matter(
    encoding: str, end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    text = f'# für alle\nARGS="\n --hidden-size 64\n"\n{LINE} \\\n  $ARGS --save "$OUT/x"\n'
    script.write_bytes(text.replace("\n", end).encode(encoding))
    from_megatron.main([str(script), "--set", "OUT=/out"])
    told = capsys.readouterr().out
    assert "--hidden-size 64 \\\n" in told
    assert "--save /out/x" in told


def test_a_blank_behind_a_backslash_is_told() -> None:
    """There the shell ends the command, and all flags behind it are lost."""
    script = read_script(f"{LINE} \\ \n    --hidden-size 64 \\\n    --bf16\n")
    assert "--hidden-size begins a command" in script.notes[0]


WORDS = (
    *("if", "then", "fi", "for", "in", "do", "done", "case", "esac", "{", "}", "(", ")", "$(", "`"),
    *("'", '"', "\\", "\n", ";", ";;", "&&", "|", "<<", "<<<", "<(", ">", "$", "${", "$((", "))"),
    *("A=", "A+=(", "[[", "]]", "[", "]", "((", "#", "!", "=", "-f", "$A", "${A:-", "${A[@]}"),
    *(
        "torchrun",
        "x.py",
        "--lr",
        "eval",
        "bash -c",
        "set --",
        "shift",
        "f()",
        "\0",
        "\r",
        "\ufeff",
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=30))
def test_any_text_is_read_or_refused_with_its_line(words: list[str]) -> None:
    assert is_read_or_refused(" ".join(words).replace("\0", ""))
