"""Building blocks: a file per schedule, and two files that add vocabulary passes to any block."""
