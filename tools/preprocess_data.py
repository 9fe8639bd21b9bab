#!/usr/bin/env python3
"""Turn text into token files: the command preprocess-data, from a checkout.

python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --tokenizer-type ...
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.preprocess_data import main

if __name__ == "__main__":
    sys.exit(main())
