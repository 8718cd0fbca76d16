"""Function-preserving rescale: weights times powers of two, so that every value fits and the outputs stay as they are.

How it is found: a float32 run is watched, operation by operation, and tells how each value scales with the weights
(`expressions`, `rules`). The equations of all operations together leave some exponents free, and an integer program
chooses among these (`solve`). Nothing here knows a model by name: pairs of linear layers around a ReLU, values and
outputs of attention, gated products, linear layers beside norms, tied embeddings and whole residual streams are all
solutions of the same equations.

Background: scaling between layers that leaves the function as it is, for quantization (Nagel et al., 2019,
"Data-Free Quantization Through Weight Equalization and Bias Correction"), and by hand for the SDXL decoder and T5 in
half precision. Here by powers of two, which round nothing.
"""

from overflow_lab.remedies.scaling.rescale import propose

__all__ = ["propose"]
