#!/usr/bin/env python3
"""Read a launch script of Megatron-LM: the command from-megatron, from a checkout.

python tools/from_megatron.py train_gpt.sh --set NNODES=16
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.from_megatron import main

if __name__ == "__main__":
    main()
