#!/usr/bin/env python3
"""Explore schedules on a page: the command explore-schedules, from a checkout.

python tools/explore.py
python tools/explore.py --candidates ways/
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.explore_schedules import main

if __name__ == "__main__":
    main()
