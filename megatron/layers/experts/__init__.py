"""Mixtures of experts: a router sends every token to a few of many MLPs."""
