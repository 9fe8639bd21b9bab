"""Where a script assigns in odd ways, a value is that of bash, or the variable is told as unknown.

In place of torchrun bash has a function that prints its words.
"""

import shutil
import subprocess

import pytest

from megatron.foreign.walk import read_script

STAND_IN = 'torchrun() { printf "<%s>" "$@"; }\n'
LAUNCH = 'torchrun pretrain_gpt.py --num-layers 1 --lr 1 --n "$N"'

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not there")

COMPUTED = (
    *("D=2\n((N = D*16))", "N=1\n((N++))", "N=1; let N=N*64", "N=1; ((N += 2))", "((N = 3, 1))"),
    *("M=4\nlet 'N = M * 64'", "N=7; (( --N ))", "N=7; M=$((N++))", "N=7; M=$((M = N * 2))"),
    *("declare -i N=2+3", "declare -i N; N=2*4", "declare -i N=5; N+=1", "M=010; N=$((M+1))"),
    *("N=$((010+1))", "N=1; N=$((!N + 1))", "N=2; N=$((-N**2))", "N=1; N=$((N--1))"),
    *("declare -u N=ab", "N=1; declare -n R=N; R=5", "N=1; : $((N=5))", "N=1; : ${M:=$((N=5))}"),
)
LOOPS = (
    "N=1; while [ $N -lt 9 ]; do N=$((N*2)); done",
    "N=1; until ((N >= 9)); do N=$((N*2)); done",
    "N=1; while ((N++ < 9)); do :; done",
    "N=1; for ((i = 0; i < 4; i++)); do N=$((N+i)); done",
    "for ((N = 0; N < 4; N++)); do :; done",
    "for n in 1 2 3; do N=$n; [ $n = 2 ] && break; done",
    "for n in 1 2 3; do [ $n = 2 ] && continue; N=$n; done",
    "N=1; for n in {1..4}; do N=$n; done",
    "N=1; for n in 1 2 3; do N=$((N+n)); done",
    "N=1; for n in *; do N=$((N+1)); done",
    "N=1; f() { N=$((N+1)); }; while [ $N -lt 4 ]; do f; done",
    'N=1; C="N=5"; while [ $N -lt 4 ]; do eval $C; done',
    "N=1; M=1; while [ $M -lt 3 ]; do N=$M; M=$((M+1)); done",
    "set -- a b c; while [ $# -gt 1 ]; do shift; done; N=$1",
    "while read N; do M=$N; done <<< 5; N=$M",
    "f() { for n in 1 2; do N=$n; return; done; N=9; }; f",
)
ELSEWHERE = (
    *("N=1; (N=9)", "N=1; true | N=5", "N=1; echo 5 | read N", "N=1; N=5 & wait; echo"),
    *("N=1; echo 3 | while read n; do N=$n; done", "N=1; (N=9; (N=8)); true | { N=3; }"),
    *("f() { return 1; }; f || N=4", "N=1; f() { return 1; }; f && N=4"),
    *("f() { N=2; false; }; f || N=4", "N=1; f() { exit; }; (f); N=2"),
    *("f() { if [ $1 = a ]; then N=4; return; fi; N=5; }; f a", "N=1; f() { local N=9; }; f"),
    *("N=1; f() { N=2; return 1; N=3; }; f", "N=1; grep -q x /dev/null && N=4"),
    *("grep -q x /dev/null || N=4", "N=1; [ -f /nothing ] && [ a = a ] && N=4"),
    *("N=1; if [ a = b ] && N=5; then :; fi", "N=1; if [ -f /no ] && N=5; then :; fi"),
    *("N=1; [ a = b ] && true | N=5", "printf -v N %d 7", "N=1; printf -vN %02d 7"),
    *("case a in a) N=1 ;& b) N=2 ;; esac", "N=1; ! N=4", "N=1; [[ 010 -eq 8 ]] && N=4"),
    *("M=5; N=1; [[ M -gt 4 ]] && N=4", "N=1; if ((N = 5)); then :; fi", "N=2; getopts n: N -n3"),
    *("N=1; A=([$((N++))]=2)", "set -- 4 5; [ -f /x ] && shift; N=$1", "N=1; bash -c 'N=2'"),
    *("N=1; f() { grep -q x /dev/null || return 1; N=3; }; f", "N=2; N=$[N+1]"),
    *("N=1; shopt -s lastpipe; true | N=5", "N=1; f() { N=3; }; f | cat", "N=1; f() ( N=3 ); f"),
    *("N=1; time N=4", "N=1; builtin printf -v N 5", "N=1; ! ((N++))"),
)  # fmt: skip


def words_of_bash(script: str) -> str:
    done = subprocess.run(
        ["bash", "-c", f"{STAND_IN}{script}"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.rpartition("<--n><")[2].removesuffix(">")


@pytest.mark.parametrize("begin", [*COMPUTED, *LOOPS, *ELSEWHERE])
def test_a_value_is_that_of_bash_or_its_variable_is_told(begin: str) -> None:
    script = f"{begin}\n{LAUNCH}"
    found = read_script(script)
    (launch,) = found.launches
    holes = found.holes.within(launch.words[-1])
    if not holes:
        assert launch.words[-1] == words_of_bash(script)
    assert all(hole.name or hole.text in script for hole in holes)


@pytest.mark.parametrize(
    "begin",
    [
        *("D=2\n((N = D*16))", "N=1\n((N++))", "N=1; let N=N*64", "N=1; (N=9)", "N=1; true | N=5"),
        *("declare -i N=2+3", "N=1; f() { local N=9; }; f", "N=1; for n in 1 2; do N=$n; done"),
        *("N=1; N=5 & wait", "N=1; mkdir -p /tmp && echo", "N=1; f() { N=2; return 1; }; f"),
    ],
)
def test_what_is_certain_is_computed(begin: str) -> None:
    script = f"{begin}\n{LAUNCH}"
    assert read_script(script).launches[0].words[-1] == words_of_bash(script)


@pytest.mark.parametrize(
    "begin",
    [
        *("((N = M*16))", "let N=M+1", "printf -v N 5", "declare -i N=010+1", "N=$(x) || N=4"),
        *("while [ -f x ]; do N=5; done", "for n in $M; do N=$n; done", "f() { x; }; f || N=4"),
    ],
)
def test_what_is_not_known_has_a_note_and_can_be_given(begin: str) -> None:
    script = f"N=1\n{begin}\n{LAUNCH}"
    found = read_script(script)
    (hole,) = found.holes.within(found.launches[0].words[-1])
    assert hole.name == "N"
    assert any(note.startswith("line 2: ") and "N" in note for note in found.notes)
    assert read_script(script, {"N": "7"}).launches[0].words[-1] == "7"


def test_flags_to_which_a_loop_appends_stay() -> None:
    script = "A=(--bf16)\nB='--swiglu'\nfor x in $L; do A+=(--x $x); B=\"$B --y\"; done\n"
    found = read_script(f'{script}{LAUNCH} "${{A[@]}}" $B')
    words = [found.holes.shown(word) for word in found.launches[0].words[6:]]
    assert words == ["--bf16", "$A", "--swiglu", "$B"]


def test_launches_in_subshells_pipelines_and_behind_functions_count() -> None:
    launch = LAUNCH.replace('"$N"', "1")
    script = f"(cd x && {launch} --a)\n{launch} --b | tee log\n{launch} --c &\n"
    script += f"f() {{ x; }}\nf && {launch} --d"
    assert [own.words[-1] for own in read_script(script).launches] == ["--a", "--b", "--c", "--d"]
