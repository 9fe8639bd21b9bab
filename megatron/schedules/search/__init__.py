"""How a plan is shortened. You need not read this to add a schedule."""
