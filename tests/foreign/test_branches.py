"""What a reader cannot decide is told, and nothing is made up for it."""

import pytest

from megatron.foreign.judge import Job, judgement_of
from megatron.foreign.walk import read_script

LINE = "torchrun pretrain_gpt.py --num-layers 8 --lr 1e-4"


def words_of(script: str, **given: str) -> tuple[list[str], str]:
    """The further words of the one training, and all notes."""
    found = read_script(script, {name.lstrip("_"): value for name, value in given.items()})
    (launch,) = found.launches
    return list(map(found.holes.shown, launch.words[4:])), "\n".join(found.notes)


def test_a_branch_that_is_known_is_taken() -> None:
    script = f'N=${{1:-8}}\nif [ "$N" -gt 4 ]; then A=--bf16; else A=--fp16; fi\n{LINE} $A'
    assert words_of(script) == (["--bf16"], 'line 2: if [ "$N" -gt 4 ]: true, its branch is read')
    words, notes = words_of(script, _1="2")
    assert words == ["--fp16"]
    assert "false, its branch is left out" in notes


@pytest.mark.parametrize("test", ["[ -f x ]", '[ "$1" = a ]', "grep -q x y", "[ $(id) = 1 ]"])
def test_flags_of_the_only_branch_that_has_any_are_read(test: str) -> None:
    script = f"A=--bf16\nif {test}; then A+=' --swiglu'; fi\nB=()\n{test} && B+=(--x 1)\n"
    words, notes = words_of(f'{script}{LINE} $A "${{B[@]}}"')
    assert words[:2] == ["--bf16", "--swiglu"]
    assert "is not known: all branches are read" in notes


def test_of_several_branches_with_flags_the_first_counts_and_this_is_told() -> None:
    script = f"if [ -f x ]; then A=--bf16; elif [ -f y ]; then A=--fp16; fi\n{LINE} $A"
    words, notes = words_of(script)
    assert words == ["--bf16"]
    assert "the first branch that has flags counts for A" in notes


def test_a_variable_that_every_branch_leaves_empty_is_empty() -> None:
    assert words_of(f'if [ -f x ]; then A=""; B=" "; fi\n{LINE} $A $B')[0] == []


def test_values_that_depend_on_a_branch_are_not_known_and_have_choices() -> None:
    script = f"""case $SIZE in
  7B) N=32 ;;
  70B) N=80 ;;
  *) echo unknown; exit 1 ;;
esac
{LINE} --hidden-size $N"""
    found = read_script(script)
    (hole,) = found.holes.within(found.launches[0].words[-1])
    assert (hole.name, hole.choices) == ("N", ("32", "80"))
    assert "case $SIZE (of 7B, 70B, *) is not known" in found.notes[0]
    assert words_of(script, SIZE="70B")[0] == ["--hidden-size", "80"]


def test_a_branch_that_ends_the_script_is_not_followed() -> None:
    script = f'[ $# -lt 2 ] && exit 1\nif [ -z "$D" ]; then echo no D; exit 1; fi\n{LINE} $D'
    words, notes = words_of(script)
    assert words == ["$D"]
    assert 'line 2: if [ -z "$D" ]: true, its branch is read' in notes
    assert 'line 2: [ -z "$D" ]: the script would end here' in notes


def test_what_stands_behind_an_exit_is_not_read() -> None:
    assert len(read_script(f"{LINE}\nexit 0\n{LINE} --bf16").launches) == 1
    assert len(read_script(f"exec {LINE}\n{LINE} --bf16").launches) == 1


def test_variables_of_slurm_come_from_the_head_of_the_script() -> None:
    script = f"""#!/bin/bash
#SBATCH --nodes=16   # machines
#SBATCH --gres=gpu:h100:4
#SBATCH --ntasks-per-node 1
torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_ON_NODE {LINE[9:]}
"""
    (launch,) = read_script(script).launches
    assert (launch.ranks.machines, launch.ranks.per_machine) == (16, 4)


@pytest.mark.parametrize(
    ("begin", "ranks"),
    [
        ("python pretrain_gpt.py", (1, 1)),
        ("torchrun --nproc-per-node=4 pretrain_gpt.py", (1, 4)),
        ("python3 -m torch.distributed.run --nnodes 3 --nproc_per_node 2 -m pretrain_gpt", (3, 2)),
        ("srun -N 4 --ntasks-per-node=8 python pretrain_gpt.py", (4, 8)),
        ("srun -N4 -n 16 numactl --cpunodebind=0 python pretrain_gpt.py", (4, 4)),
        ("srun -n 64 python pretrain_gpt.py", (8, 8)),
        ("mpirun -np 16 --bind-to none python pretrain_gpt.py", (2, 8)),
        ("mpirun -np 6 python pretrain_gpt.py", (1, 6)),
        ("deepspeed --num_nodes 2 --num_gpus 4 pretrain_gpt.py", (2, 4)),
        ("deepspeed pretrain_gpt.py", (None, None)),
        ("accelerate launch --num_processes 16 --num_machines 2 pretrain_gpt.py", (2, 8)),
        ("nohup nsys profile -o x torchrun --nproc_per_node 8 ./pretrain_gpt.py", (1, 8)),
        ("X=1 exec srun -N 2 img torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py", (2, 8)),
        ("torchrun --nproc_per_node gpu pretrain_gpt.py", (1, None)),
        ("torchrun --nproc_per_node $(nvidia-smi -L | wc -l) pretrain_gpt.py", (1, None)),
        ("ssh node1 bash -lc 'torchrun --nproc_per_node 8 pretrain_gpt.py", (1, 8)),
    ],
)  # fmt: skip
def test_launchers_tell_their_ranks(begin: str, ranks: tuple[int | None, int | None]) -> None:
    end = "'" if "-lc '" in begin else ""
    (launch,) = read_script(f"{begin} --num-layers 8 --lr 1e-4{end} > log 2>&1 &").launches
    assert (launch.ranks.machines, launch.ranks.per_machine) == ranks
    assert launch.program.removesuffix(".py").endswith("pretrain_gpt")


def test_quotes_within_a_value_are_left_out_and_told() -> None:
    script = read_script(f"A=(\"--split '99,1,0'\")\n{LINE} ${{A[@]}}")
    (launch,) = script.launches
    own = judgement_of(launch, Job(script.holes, launch.ranks))
    assert own.flags[-1].values == ("99,1,0",)
    assert own.unquoted == ("'99,1,0'",)


def test_programs_without_a_training_are_passed_over() -> None:
    script = f"python tools/preprocess_data.py --input x\npython -m pip install x\n{LINE}"
    assert words_of(script) == ([], "")
    (launch,) = read_script(LINE.replace("pretrain_gpt", "pretrain_t5")).launches
    assert not launch.trains_gpt
