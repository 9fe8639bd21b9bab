"""Building blocks: a file per schedule, and the two that put the vocabulary into any."""
