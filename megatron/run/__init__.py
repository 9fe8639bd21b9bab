"""A run: its command line is read and judged here, and becomes the nodes that every room is handed."""
