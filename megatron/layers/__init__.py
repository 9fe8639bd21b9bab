"""The parts of a transformer, and the vocabulary layers S, T, IF, IB."""
