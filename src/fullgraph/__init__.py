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
from fullgraph.nn import (
    LINEAR_OPS,
    Linear,
    Save,
    Wgrad,
    attach,
    autocast,
    linear,
    make_weight_caches,
    save_linears,
    update_scales,
)
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
from fullgraph.statistics import (
    Statistics,
    TensorStatistics,
    collect_statistics,
    plot_statistics,
    read_statistics,
)
from fullgraph.tensor import QuantizedParts, QuantizedTensor, Quantizer

__all__ = [
    "BOTH",
    "COLUMNWISE",
    "LINEAR_OPS",
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
    "Save",
    "Scaling",
    "Statistics",
    "TensorStatistics",
    "Wgrad",
    "__version__",
    "attach",
    "autocast",
    "collect_statistics",
    "convert",
    "customop",
    "errors",
    "explain",
    "linear",
    "make_weight_caches",
    "plot_statistics",
    "quantize",
    "read_statistics",
    "recipes",
    "save_linears",
    "testing",
    "update_scales",
]
