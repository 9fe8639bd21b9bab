#!/usr/bin/env python3
"""Generate or score text: the command generate-text, from a checkout.

python tools/generate.py CHECKPOINTS --ids --prompt "9707 11 1879"
torchrun --nproc-per-node 4 tools/generate.py CHECKPOINTS --ids --prompts-file prompts.txt
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.generate_text import main

if __name__ == "__main__":
    main()
