#!/usr/bin/env python3
"""Score a trained model on the tasks of lm-evaluation-harness (pip install lm_eval).

python tools/evaluate.py --tasks hellaswag,arc_easy
    --model_args checkpoints=CHECKPOINTS

It is the harness's own command with the model "vocab-parallel"; all its flags work. Under torchrun
the ranks share the layers and the vocabulary, and the first one prints. The arguments of the model
are those of VocabParallelLM in megatron/inference/harness.py.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.environment import in_environment

with in_environment():
    from lm_eval.__main__ import cli_evaluate

    import megatron.inference.harness  # noqa: F401 (the import registers the model)
    from megatron.parallel.environment import launched


def main() -> None:
    """Run the harness's command."""
    if launched().rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    if "--model" not in sys.argv:
        sys.argv += ["--model", "vocab-parallel"]
    cli_evaluate()


if __name__ == "__main__":
    main()
