r"""My model, my GPUs: which line? Proposes how to run a job, and predicts what it gives.

plan-pretraining --model config.json --gpus 64xH100 --global-batch-tokens 4M --seq-length 8192
plan-pretraining --model my-llama/ --gpus 18x4xGB200 --global-batch-tokens 8M --seq-length 8192 \
  --tokens 1T --slurm
plan-pretraining --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 256000 \
  --gpus 8xH100 --global-batch-size 128 --seq-length 4096

No GPU is needed, and no weights. Tensor-, context-, expert- and pipeline-parallel ranks, the micro
batch, recomputation and other ways to hold less, the schedule and the treatment of the vocabulary
are chosen. All flags of pretrain_gpt.py may be given too: what they decide is not chosen again.
"""

import json
import sys
from collections.abc import Sequence

from megatron.commands.environment import in_environment

with in_environment():
    from megatron.commands.whole_process import reader_may_stop_early, without_garbage_collection
    from megatron.flags.readable import told_as_error
    from megatron.planning.asked.question import question_of
    from megatron.planning.explored import write_ways
    from megatron.planning.plan_json import as_json
    from megatron.planning.plan_report import report
    from megatron.planning.processes import cores
    from megatron.planning.propose import propose
    from megatron.schedules.search.watch import Watch


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        argv: words of the command line; ``None``: the words of this process.
    """
    with reader_may_stop_early(), told_as_error(OSError, ValueError):
        question = question_of(argv, __doc__)
        with without_garbage_collection():
            answer = propose(question, Watch.of_rank(0), cores())
        if question.json:
            print(json.dumps(as_json(answer), indent=2))
        else:
            print(*report(answer), sep="\n\n", flush=True)
        if question.explore is not None:
            write_ways(answer, question.explore)
            told = f"wrote {question.explore}: explore-schedules --candidates {question.explore}"
            script = "in a checkout: python tools/explore.py"
            print(f"\n{told} shows {len(answer.seen)} ways as points ({script})", file=sys.stderr)


if __name__ == "__main__":
    main()
