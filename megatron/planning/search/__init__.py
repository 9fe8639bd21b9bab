"""One search for every choice that a run leaves open: edits of a command line, the best first."""
