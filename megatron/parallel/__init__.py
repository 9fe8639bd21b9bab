"""The rank grid, its process groups, and the lanes that communication runs on."""
