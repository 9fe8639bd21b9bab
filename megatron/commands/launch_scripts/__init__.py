"""Launch scripts and configurations of other programs, read as text: nothing of them is run."""
