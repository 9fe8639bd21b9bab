"""Which pass runs where, and in which order: blocks, plans, programs. Standard library only."""
