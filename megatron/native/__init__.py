"""C++ that is compiled on the user's machine; everything has a slower twin without."""
