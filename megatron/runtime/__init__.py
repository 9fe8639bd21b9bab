"""Execution of a program on one rank: passes, communication, activation store, timeline."""
