"""Whole launch scripts around lists of flags, in several styles of public ones."""

import shlex
from collections.abc import Callable, Mapping, Sequence

Flags = Sequence[Sequence[str]]


def quoted(flag: Sequence[str]) -> str:
    """A flag with its values, as a shell reads them."""
    return shlex.join(flag)


def as_arrays(flags: Flags) -> str:
    """Arrays of flags with comments, which torchrun gets one after the other."""
    half = len(flags) // 2
    parts = {"MODEL_ARGS": flags[:half], "TRAINING_ARGS": flags[half:-2]}
    arrays = "\n".join(
        f"{name}=(\n"
        + "\n".join(f"    {quoted(flag)}  # number {at}" for at, flag in enumerate(own))
        + "\n)\n"
        for name, own in parts.items()
    )
    more = "\n".join(f"TRAINING_ARGS+=({quoted(flag)})" for flag in flags[-2:])
    return f"""#!/bin/bash
# A job on one machine.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=${{GPUS_PER_NODE:-8}}
NUM_NODES=2
WORLD_SIZE=$(($GPUS_PER_NODE * $NUM_NODES))

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr "${{MASTER_ADDR:-localhost}}"
)

{arrays}
{more}

torchrun ${{DISTRIBUTED_ARGS[@]}} pretrain_gpt.py \\
    "${{MODEL_ARGS[@]}}" \\
    "${{TRAINING_ARGS[@]}}"
"""


def as_arrays_unquoted(flags: Flags) -> str:
    """The same, with arrays outside of quotes, and flags of underscores."""
    spelled = [(flag[0].replace("-", "_").replace("__", "--", 1), *flag[1:]) for flag in flags]
    return as_arrays(spelled).replace('"${MODEL_ARGS[@]}"', "${MODEL_ARGS[@]}")


def as_one_string(flags: Flags) -> str:
    """A string of many lines, each value in a variable of its own, run by the old launcher."""
    names, rows = [], []
    for at, (option, *values) in enumerate(flags):
        is_plain = values and all(value.isalnum() for value in values)
        if is_plain and at % 2 == 0:
            name = option.lstrip("-").upper().replace("-", "_")
            names.append(f"{name}{at}={' '.join(values)!r}".replace("'", '"'))
            rows.append(f"    {option} ${{{name}{at}}} \\")
        else:
            rows.append(f"    {' '.join([option, *values])} \\")
    body = "\n".join(rows)
    values_of = "\n".join(names)
    return f"""#! /bin/bash
{values_of}

options=" \\
{body}
"

DISTRIBUTED_ARGS="--nproc_per_node 8 --nnodes 2 --node_rank 0 --master_port 6000"
run_cmd="python -m torch.distributed.launch $DISTRIBUTED_ARGS ./pretrain_gpt.py $options"

echo ${{run_cmd}}
$run_cmd
set +x
"""


def by_srun(flags: Flags) -> str:
    """A batch script whose tasks start a shell each, with the line in a text."""
    body = " \\\n".join(f"    {quoted(flag)}" for flag in flags)
    return f"""#!/bin/bash
#SBATCH --job-name=gpt        # of the queue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
set -x -e

source $SIX_ALL/start-prod
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
GPUS_PER_NODE=8
NNODES=$SLURM_NNODES
FLAGS=" \\
{body} \\
"
export LAUNCHER="python -u -m torch.distributed.run \\
    --nproc_per_node $GPUS_PER_NODE \\
    --nnodes $NNODES \\
    --rdzv_endpoint $MASTER_ADDR:6000 \\
    --max_restarts 0 \\
    "
export CMD=" `pwd`/pretrain_gpt.py $FLAGS"
cat <<EOF > config.json
{{ "train_batch_size": "not closed }}
torchrun pretrain_gpt.py --num-layers 1 --micro-batch-size 1
EOF
srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt
"""


def by_srun_with_tasks(flags: Flags) -> str:
    """A batch script in which srun starts a process for every GPU."""
    body = " \\\n".join(f"        {quoted(flag)}" for flag in flags)
    return f"""#!/bin/bash
#SBATCH -N 2
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
run_train() {{
    local image=$1
    shift
    srun --container-image "$image" --export=ALL \\
        python3 -u "$MEGATRON/pretrain_gpt.py" "$@" \\
{body}
}}
for image in megatron:latest; do
    run_train $image || exit 1
done
"""


def by_deepspeed(flags: Flags) -> str:
    """A script for DeepSpeed with line ends of Windows."""
    rows = "\n".join(f'ARGS="${{ARGS}} {" ".join(flag)}"' for flag in flags)
    text = f"""#!/bin/bash
ARGS=""
{rows}
deepspeed --num_nodes 2 --num_gpus 8 --master_port=29500 pretrain_gpt.py $ARGS > log 2>&1 &
wait
"""
    return text.replace("\n", "\r\n")


def in_branches(flags: Flags) -> str:
    """A script that chooses by its size, by a switch and by what it finds."""
    third = len(flags) // 3
    parts = [" ".join(quoted(flag) for flag in own) for own in (flags[:third], flags[third:-1])]
    return f"""#!/usr/bin/env bash
MODEL_SIZE=${{1:-7B}}
if [ $MODEL_SIZE = 70B ]; then
    MODEL="--num-layers 80 --hidden-size 8192"
elif [[ "$MODEL_SIZE" == "7B" ]]; then
    MODEL={shlex.quote(parts[0])}
else
    echo "unknown size $MODEL_SIZE" >&2
    exit 1
fi
case $MODEL_SIZE in
    7B|8B) REST={shlex.quote(parts[1])} ;;
    *) REST="--fp16" ;;
esac
[ -z "$LAST" ] && LAST={shlex.quote(quoted(flags[-1]))}
[[ -n "$WANDB" ]] && REST="$REST --wandb-project gpt"
(( 2 > 3 )) && REST="$REST --fp32"
mkdir -p logs && cd logs
eval "torchrun --nproc-per-node=8 --nnodes=2 pretrain_gpt.py $MODEL $REST $LAST"
"""


STYLES: Mapping[str, Callable[[Flags], str]] = {
    own.__name__: own
    for own in (
        as_arrays,
        as_arrays_unquoted,
        as_one_string,
        by_srun,
        by_srun_with_tasks,
        by_deepspeed,
        in_branches,
    )
}
