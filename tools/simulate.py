#!/usr/bin/env python3
"""Simulate a schedule: the command simulate-schedule, from a checkout.

python tools/simulate.py --pipeline-schedule zb-v --vocab-parallel vocab-2 -p 4 -m 8 --text
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.commands.simulate_schedule import main

if __name__ == "__main__":
    main()
