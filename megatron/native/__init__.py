"""C++ that is compiled on the user's machine; every function has a slower version without it."""
