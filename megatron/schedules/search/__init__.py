"""How a plan is shortened. To add a schedule, nobody needs to read this."""
