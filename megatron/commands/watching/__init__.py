"""The page of ``watch-run``: the records of training runs as curves and tables."""
