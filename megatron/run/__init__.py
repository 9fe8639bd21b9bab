"""A run: its command line is read and judged here; every room is handed its own node."""
