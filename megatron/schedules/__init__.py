"""What runs where and in which order: passes, blocks, plans, programs. Standard library only."""
