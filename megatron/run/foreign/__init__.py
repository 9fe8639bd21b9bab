"""Answers to flags of Megatron-LM, and of programs made from it, that do not exist here."""
