"""The vocabulary layers: passes S and T of the output layer, IF and IB of the input layer."""
