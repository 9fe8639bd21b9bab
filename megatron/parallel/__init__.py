"""The rank grid, its process groups, and the lanes on which communication runs."""
