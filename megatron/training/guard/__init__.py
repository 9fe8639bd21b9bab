"""What guards a run of weeks: signals, the clock, hangs, lost ranks, bad losses, slow ranks."""
