#!/usr/bin/env python3
"""Propose how to run a job on given GPUs: the command plan-pretraining, from a checkout.

python tools/plan.py --model config.json --gpus 64xH100 --global-batch-tokens 4M --seq-length 8192
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.plan_pretraining import main

if __name__ == "__main__":
    main()
