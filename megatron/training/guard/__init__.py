"""Guards a run of weeks against signals, time limits, hangs, lost or slow ranks and bad losses."""
