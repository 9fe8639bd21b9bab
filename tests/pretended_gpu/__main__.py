"""Print what the paper's models would hold on GPUs.

PYTHONPATH=tests python -m pretended_gpu docs/reference/paper_table5_1f1b.csv
"""

import sys
from pathlib import Path

from pretended_gpu.paper_memory import rows
from pretended_gpu.pool import gpu_pool

with gpu_pool() as pool:
    for line in rows(Path(sys.argv[1]), pool):
        print(line, flush=True)
