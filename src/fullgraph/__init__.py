"""Low-precision training of transformers in one graph: every layer one node forward, one node backward.

Everything public is named here. `fullgraph.customop` is the framework below the layers, of use on its own.
"""

from fullgraph import customop, errors, recipes, testing
from fullgraph._version import __version__
from fullgraph.convert import ConversionReport, convert
from fullgraph.explain import Report, explain
from fullgraph.formats import (
    BOTH,
    COLUMNWISE,
    ROWWISE,
    Format,
    FourOverSix,
    MXScaleMode,
    Orientation,
    Scaling,
)
from fullgraph.nn import Linear, attach, autocast, linear, update_scales
from fullgraph.quantizers import (
    BlockQuantizer,
    DelayedQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXQuantizer,
    NVFP4Quantizer,
    PerRowQuantizer,
    PerTensorQuantizer,
    quantize,
)
from fullgraph.tensor import QuantizedParts, QuantizedTensor, Quantizer

__all__ = [
    "BOTH",
    "COLUMNWISE",
    "ROWWISE",
    "BlockQuantizer",
    "ConversionReport",
    "DelayedQuantizer",
    "Format",
    "FourOverSix",
    "HybridQuantizer",
    "IdentityQuantizer",
    "Linear",
    "MXQuantizer",
    "MXScaleMode",
    "NVFP4Quantizer",
    "Orientation",
    "PerRowQuantizer",
    "PerTensorQuantizer",
    "QuantizedParts",
    "QuantizedTensor",
    "Quantizer",
    "Report",
    "Scaling",
    "__version__",
    "attach",
    "autocast",
    "convert",
    "customop",
    "errors",
    "explain",
    "linear",
    "quantize",
    "recipes",
    "testing",
    "update_scales",
]
