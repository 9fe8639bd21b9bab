"""The operations that layers and gradients need from a device, in mathematical terms.

``reference`` says of each what it computes, and computes it in PyTorch: it is the specification.
The kernels of a device inherit it, and have their own form of what they compute faster. Each rounds
as it likes within its types, and one contract test compares all of them with float64. Nothing above
this package knows the device.

Shapes: ``...`` any leading dimensions; h hidden size; b batch, s sequence, d channels of a head,
a query heads, g key/value heads, r = a / g; for the vocabulary n tokens, v rows of a shard without
padding, t rows of a tile.
Types: an *activation* has the type that the kernels were chosen for; a *statistic* and a gradient
over microbatches are fp32, or float64 for float64 activations. A name that ends in an underscore
writes into its first argument.
"""

from typing import TypeAlias

from megatron.kernels.reference.kernels import ReferenceKernels

Kernels: TypeAlias = ReferenceKernels
"""The kernels of any device."""
