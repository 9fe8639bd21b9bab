"""Flags as they are declared, read, checked and shown, for training and for every tool."""
