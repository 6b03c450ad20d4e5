"""Low-precision training of transformers in one graph: every layer one node forward, one node backward.

Everything public is named here. `fullgraph.customop` is the framework below the layers, of use on its own.
"""

from fullgraph import customop, errors, recipes, testing
from fullgraph._version import __version__
from fullgraph.convert import ConversionReport, convert
from fullgraph.explain import Report, explain
from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Format, Orientation
from fullgraph.nn import Linear, autocast, linear
from fullgraph.quantizers import PerTensorQuantizer, quantize
from fullgraph.tensor import QuantizedTensor

__all__ = [
    "BOTH",
    "COLUMNWISE",
    "ROWWISE",
    "ConversionReport",
    "Format",
    "Linear",
    "Orientation",
    "PerTensorQuantizer",
    "QuantizedTensor",
    "Report",
    "__version__",
    "autocast",
    "convert",
    "customop",
    "errors",
    "explain",
    "linear",
    "quantize",
    "recipes",
    "testing",
]
