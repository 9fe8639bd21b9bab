"""Text to token ids and back. The types carry Megatron-LM's names and number ids as it does."""
