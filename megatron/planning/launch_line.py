"""The line that starts a job, ready to run: by torchrun on every machine, or by Slurm."""

from collections.abc import Sequence

from megatron.planning.asked.question import Question


def launch_line(question: Question, words: Sequence[str]) -> str:
    """Return lines of a shell that start the job, by torchrun or, if asked for, by Slurm.

    The first lines are those that the user fills: data, tokenizer, learning rate, the folder for
    checkpoints, and the length if the question does not tell it. The shell refuses by name what is
    left empty.

    Args:
        question: tells the GPUs, and the flags that do not depend on the layout.
        words: flags of the layout and the plan, which stand behind ``question.words``.
    """
    raise NotImplementedError
