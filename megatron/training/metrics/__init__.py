"""Times, memory and log lines of a run."""
