"""Compiled code: this project's C++, which has slower versions without it, and other packages."""
