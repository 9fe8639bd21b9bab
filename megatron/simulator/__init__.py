"""How long a program takes and how much memory it holds. Standard library only."""
