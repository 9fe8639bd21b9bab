"""The command line: one declaration per flag, and the frozen configurations that flags become."""
