"""What a run measures and prints of itself."""
