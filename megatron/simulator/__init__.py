"""The time that a program takes and the memory that it holds. Standard library only."""
