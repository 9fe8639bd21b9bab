"""The answers to a script's flags are those of the parser, and the lines to run can be run."""

import shlex
import subprocess

import pytest

from megatron.foreign.flags import sorted_flags
from megatron.foreign.judge import Job, Judgement, judgement_of, with_numbers
from megatron.foreign.launches import Launch, Ranks
from megatron.foreign.line import launch_text
from megatron.foreign.values import Holes
from megatron.foreign.walk import read_script
from megatron.run.command_line import read
from megatron.run.schedule import treatment_of
from tools.launch_lines_page import LaunchList, asked, launch_lists, told

STAND_IN = 'torchrun() { printf "%s\\0" "$@"; }\nsrun() { printf "%s\\0" "$@"; }\n'
SMALL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 16 --train-iters 10 "
    "--lr 1e-3 --bf16 --pipeline-model-parallel-size 4 --eval-iters 1 "
)


def answered(words: list[str], ranks: Ranks, launcher: str = "torchrun") -> Judgement:
    launch = Launch(1, launcher, ranks, "pretrain_gpt.py", tuple(words))
    return judgement_of(launch, Job(Holes(), ranks))


def of_script(text: str, *nodes: int) -> tuple[Judgement, Holes]:
    script = read_script(text)
    launch = script.launches[0]
    ranks = with_numbers(launch.ranks, *nodes) if nodes else launch.ranks
    return judgement_of(launch, Job(script.holes, ranks)), script.holes


def by_bash(line: str, **variables: str) -> list[str]:
    done = subprocess.run(
        ["bash", "-c", STAND_IN + line],
        env={"NODE_RANK": "0", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("launch", launch_lists(), ids=lambda launch: launch.name)
def test_answers_are_those_of_the_page_of_launch_lines(launch: LaunchList) -> None:
    own = answered(launch.words, Ranks(None, None))
    theirs = {answer.flag for answer in told(launch) if answer.verdict == "refused"}
    assert {answer.flag for answer in own.told if answer.verdict == "refused"} == theirs
    assert {answer.flag for answer in own.as_is.left_out} == theirs
    assert not own.as_is.changes
    words = [word for flag in own.as_is.flags for word in (flag.option, *flag.values)]
    replicas = asked(launch)[len(launch.words) :]
    assert not read([*words, *replicas], world_size=1).mistakes
    if own.split is not None:
        assert not own.split.changes
        words = [word for flag in own.split.flags for word in (flag.option, *flag.values)]
        found = read([*words, *replicas], world_size=1)
        assert not found.mistakes
        assert treatment_of(found.flags) == "vocab-2"


@pytest.mark.parametrize("launch", launch_lists()[::3], ids=lambda launch: launch.name)
def test_a_shell_reads_the_line_as_the_flags_that_stay(launch: LaunchList) -> None:
    own = answered(launch.words, Ranks(2, 8))
    line = launch_text(own, own.as_is, Holes())
    filled = line.replace("MASTER_ADDR=", "MASTER_ADDR=node").replace("DATA_PATH=", "DATA_PATH=d")
    words = by_bash(filled.replace("TOKENIZER=", "TOKENIZER=t"))
    program = words.index("pretrain_gpt.py")
    assert words[:4] == ["--nnodes", "2", "--nproc-per-node", "8"]
    kept = [word for flag in own.as_is.flags for word in (flag.option, *flag.values)]
    assert words[program + 1 :][: len(kept)] == kept


def test_every_flag_stands_in_a_line_of_its_own() -> None:
    own = answered(SMALL.split(), Ranks(1, 8))
    rows = launch_text(own, own.as_is, Holes()).splitlines()
    begin = next(at for at, row in enumerate(rows) if row.startswith("torchrun"))
    assert rows[begin] == "torchrun --standalone --nproc-per-node 8 pretrain_gpt.py \\"
    assert all(row.split()[0].startswith("--") for row in rows[begin + 1 :])
    assert all(row.endswith(" \\") for row in rows[begin:-1])


def test_srun_stays_srun() -> None:
    own = answered(SMALL.split(), Ranks(2, 4), "srun")
    assert "srun --nodes=2 --ntasks-per-node=4" in launch_text(own, own.as_is, Holes())


def test_values_that_are_not_known_are_asked_for_and_judge_nothing() -> None:
    words = SMALL.replace("--num-layers 8", "--num-layers $LAYERS")
    text = (
        f"LAYERS=$(layers)\ntorchrun pretrain_gpt.py {words} --save '/a b'/$1 --data-path $D $OPTS"
    )
    own, holes = of_script(text, 1, 8)
    assert [flag.shown(holes) for flag in own.unknown] == [
        "--num-layers $LAYERS",
        "--save /a b/$1",
        "--data-path $D",
    ]
    assert [hole.text for hole in own.further] == ["$OPTS"]
    assert not own.as_is.changes
    line = launch_text(own, own.as_is, holes)
    for name in ("LAYERS", "VALUE_", "D", "TOKENIZER"):
        assert f"\n{name}" in line
    filled = line.replace("LAYERS=", "LAYERS=8").replace("TOKENIZER=", "TOKENIZER=t")
    filled = filled.replace("VALUE_2=", "VALUE_2='c d'").replace("\nD=", "\nD=e")
    words_run = by_bash(filled)
    assert words_run[words_run.index("--save") + 1] == "/a b/c d"
    assert words_run[words_run.index("--num-layers") + 1] == "8"


def test_ranks_that_do_not_fit_are_told() -> None:
    own = answered(SMALL.split(), Ranks(1, 6))
    assert (own.sizes.p, own.sizes.world, own.sizes.d) == (4, 6, None)
    assert answered(SMALL.split(), Ranks(2, 4)).sizes.d == 2


def test_what_must_change_is_told_and_stays_in_the_line() -> None:
    words = [*SMALL.split(), "--num-layers", "9", "--no-such-flag", "3", "--mock-data"]
    words.remove("8")
    words.remove("--num-layers")
    own = answered(words, Ranks(1, 4))
    assert [answer.flag for answer in own.as_is.left_out] == ["--no-such-flag 3"]
    assert any("--num-layers" in line for line in own.as_is.changes)
    line = launch_text(own, own.as_is, Holes())
    assert line.startswith("# Change first: ")
    assert "--num-layers 9" in line
    assert "--no-such-flag" not in line


def test_a_line_that_is_split_already_has_no_second_line() -> None:
    own = answered([*SMALL.split(), "--enable-vocab-parallel"], Ranks(1, 4))
    assert (own.split, own.treatment) == (None, "vocab-2")


def test_flags_that_name_another_treatment_leave_the_split_line() -> None:
    own = answered([*SMALL.split(), "--vocab-parallel", "redis"], Ranks(1, 4))
    assert own.split is not None
    assert [answer.flag for answer in own.split.left_out] == ["--vocab-parallel redis"]
    assert not own.split.changes


def test_room_for_the_output_layer_is_needless_with_the_split() -> None:
    words = [*SMALL.split(), "--decoder-last-pipeline-num-layers", "1"]
    words[words.index("--num-layers") + 1] = "7"
    own = answered(words, Ranks(1, 4))
    assert own.dispensable == ("--decoder-last-pipeline-num-layers 1",)


def test_megatrons_own_default_tokenizer_is_added() -> None:
    own = answered([*SMALL.split(), "--vocab-file", "v", "--merge-file", "m"], Ranks(1, 4))
    assert [" ".join([f.option, *f.values]) for f in own.as_is.added] == [
        "--tokenizer-type GPT2BPETokenizer"
    ]


def test_a_flag_without_a_value_leaves_what_stands_behind_it() -> None:
    script = read_script(f"torchrun pretrain_gpt.py {SMALL} $MORE --bf16 $LAST")
    (launch,) = script.launches
    flags, further, stray = sorted_flags(launch.words, script.holes)
    assert shlex.join(map(script.holes.shown, further)) == "'$MORE' '$LAST'"
    assert (len(flags), stray) == (len([w for w in SMALL.split() if w[:2] == "--"]) + 1, [])
