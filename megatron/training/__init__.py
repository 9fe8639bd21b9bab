"""A run: planning, set-up, step and loop; metrics and profiling."""
