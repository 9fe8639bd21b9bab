"""What the package's console commands do; in a checkout, the scripts of tools/ call the same."""
