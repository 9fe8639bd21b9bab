"""Times, memory, lines and records of a run, and where they go."""
