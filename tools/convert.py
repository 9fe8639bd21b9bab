#!/usr/bin/env python3
"""Convert models of other libraries: the command convert-checkpoint, from a checkout.

python tools/convert.py import MODEL CHECKPOINTS --seq-length 4096
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.convert_checkpoint import main

if __name__ == "__main__":
    main()
