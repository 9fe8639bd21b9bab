"""The package's console commands; in a checkout, the scripts of tools/ call the same functions."""
