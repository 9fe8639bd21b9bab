#!/usr/bin/env python3
"""Watch training runs on a page: the command watch-run, from a checkout.

python tools/watch.py run.jsonl
python tools/watch.py run.jsonl -o run.html
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.watch_run import main

if __name__ == "__main__":
    main()
