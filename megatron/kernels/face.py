"""The operations that layers and gradients need from a device, in mathematical terms.

The package ``reference`` is the specification: it describes every operation and computes it in
PyTorch. The kernels of a device inherit from it, and replace the operations that they compute
faster. Kernels may round differently within their types; one contract test compares all of them
with float64. No code outside of this package knows the device.

Shapes: ``...`` any leading dimensions; h hidden size; b batch, s sequence, d channels of a head,
a query heads, g key/value heads, r = a / g; for the vocabulary n tokens, v rows of a shard without
padding, t rows of a tile. M is the output matrix [v, h], H the input of the output layer [n, h], as
in docs/how-it-works.md, *S and T*.
Types: an *activation* has the type that the kernels were chosen for. A *statistic*, and a gradient
that is summed over microbatches, is fp32, or float64 for float64 activations. An operation whose
name ends in an underscore writes into its first argument.
"""

from typing import TypeAlias

from megatron.kernels.reference.kernels import ReferenceKernels

Kernels: TypeAlias = ReferenceKernels
"""The kernels of any device."""
