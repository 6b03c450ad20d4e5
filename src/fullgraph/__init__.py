"""Low-precision training of transformers in one graph: every layer one node forward, one backward.

Everything public is named here. `fullgraph.customop` is the framework below the layers, of use on its own;
`fullgraph.testing` and `fullgraph.errors` are imported by name.
"""

from fullgraph import customop as customop, errors as errors, recipes as recipes
from fullgraph._version import __version__ as __version__
from fullgraph.formats import (
    BOTH as BOTH,
    COLUMNWISE as COLUMNWISE,
    ROWWISE as ROWWISE,
    Format as Format,
    Orientation as Orientation,
)
from fullgraph.nn import Linear as Linear, autocast as autocast, linear as linear
from fullgraph.quantizers import PerTensorQuantizer as PerTensorQuantizer, quantize as quantize
from fullgraph.tensor import QuantizedTensor as QuantizedTensor
