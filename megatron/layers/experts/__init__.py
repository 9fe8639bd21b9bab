"""Mixtures of experts: a router sends every token to some of many MLPs."""
