"""From a configuration to the plan of an iteration, and to a forecast of its time and memory."""
