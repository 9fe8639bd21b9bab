"""C++ that is compiled on the user's machine on first use; everything has a slower twin without."""
