"""Quantizers of one's own: one whose codes GEMMs multiply, and one that only its own code can read."""

import dataclasses
import math

import pytest
import torch
from torch._dynamo.utils import counters

import fullgraph as fg
import oracles
from fullgraph import reference
from fullgraph.customop.structured import flatten
from fullgraph.errors import ConfigError
from fullgraph.formats import Scaling
from fullgraph.quantizers import as_matrix, as_parts
from fullgraph.tensor import NO_STATE, PLAIN, Layout, QuantizedParts
from linear_cases import batch, step, tensors
from oracles import assert_same_bits
from oracles_quantizers import SAMPLES

ORIENTATIONS = list(fg.Orientation)
NATIVE = Layout(frozenset(Scaling))
by_name = {"ids": lambda o: o.name}


@dataclasses.dataclass(frozen=True)
class MarginQuantizer(fg.Quantizer):
    """One that leaves room above the amax; stored as `Scaling.TENSOR` says, so GEMMs multiply its codes."""

    format: fg.Format
    margin: int = 1

    @property
    def scaling(self):
        return Scaling.TENSOR

    def quantize(self, x, orientation, layout=PLAIN, state=NO_STATE):
        pad = layout.pad(self.scaling)
        amax = reference.amax(x) * 2**self.margin
        copies = reference.cast_per_tensor(
            as_matrix(x), amax, self.format, orientation=orientation, pad=pad
        )
        return as_parts(self, x, copies, layout)


@dataclasses.dataclass(frozen=True)
class GridQuantizer(fg.Quantizer):
    """One that nobody knows how to multiply: integers from -127 to 127, an offset and a scale for each row."""

    steps: int = 127
    format: fg.Format = fg.Format.E4M3  # says how wide a code is

    def quantize(self, x, orientation, layout=PLAIN, state=NO_STATE):
        matrix = as_matrix(x).float()
        found = {}
        for copy, prefix, rows in (
            (fg.ROWWISE, "", matrix),
            (fg.COLUMNWISE, "columnwise_", matrix.t()),
        ):
            if orientation in (copy, fg.BOTH):
                low = rows.amin(1) if rows.shape[1] else rows.new_zeros(len(rows))
                width = (rows.amax(1) if rows.shape[1] else low) - low
                codes = (rows - low[:, None]) / (width[:, None] + 1e-12) * self.steps
                found[prefix + "data"] = codes.round().to(torch.uint8).contiguous()
                found[prefix + "scale_inv"] = torch.stack((low, width / self.steps), 1).contiguous()
        if "data" in found:
            found["data"] = found["data"].view(x.shape)
        if "columnwise_data" in found:
            shape = (x.shape[-1], *x.shape[:-1])
            found["columnwise_data"] = found["columnwise_data"].view(shape)
        return QuantizedParts(**found, quantizer=self, dtype=x.dtype)

    def spec(self, shape, dtype, device, orientation, layout=PLAIN):
        *leading, columns = shape
        rows = math.prod(leading)
        spec = fg.customop.TensorSpec
        found = {}
        if orientation.rowwise:
            found["data"] = spec((*leading, columns), torch.uint8, device)
            found["scale_inv"] = spec((rows, 2), torch.float32, device)
        if orientation.columnwise:
            found["columnwise_data"] = spec((columns, *leading), torch.uint8, device)
            found["columnwise_scale_inv"] = spec((columns, 2), torch.float32, device)
        return QuantizedParts(**found, quantizer=self, dtype=dtype)

    def decode_matrix(self, parts, orientation):
        scales = parts.scales(orientation)[0]
        return parts.payload(orientation).float() * scales[:, 1:] + scales[:, :1]


OWN = [MarginQuantizer(fg.Format.E4M3, margin=3), GridQuantizer(), GridQuantizer(steps=255)]
own = pytest.mark.parametrize("quantizer", OWN, ids=["margin", "grid", "fine-grid"])


@own
@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
def test_a_quantizer_of_ones_own(quantizer, orientation):
    for shape, dtype in SAMPLES:
        x = tensors(shape, dtype=dtype)
        q = fg.quantize(x, quantizer, orientation)
        assert q.quantizer == quantizer
        assert q.shape == shape
        error = (q.dequantize().float() - x.float()).norm()
        assert error <= 0.06 * x.float().norm() + 1e-6
        assert torch.equal(q.clone().copy_(x).dequantize(), q.dequantize())


@own
@pytest.mark.parametrize("orientation", ORIENTATIONS, **by_name)
def test_compiled_equals_eager(quantizer, orientation):
    def both(x):
        q = fg.quantize(x, quantizer, orientation)
        return q, q.dequantize()

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in ((6, 40), (9, 50)):
        x = torch.randn(shape)
        (q, values), (eager, eager_values) = compiled(x), both(x)
        assert_same_bits(values, eager_values)
        for ours, theirs in zip(flatten(q), flatten(eager), strict=True):
            assert_same_bits(ours, theirs)
    assert counters["stats"]["unique_graphs"] == 1


def test_margins_reach_the_cast():
    x = tensors((6, 16))
    q = fg.quantize(x, MarginQuantizer(fg.Format.E4M3, margin=3), fg.BOTH)
    assert q.scale_inv.item() == pytest.approx(8 * x.abs().max().item() / 448)


def test_scales_of_ones_own_are_shown_as_they_are():
    q = fg.quantize(torch.randn(6, 16), GridQuantizer(), fg.ROWWISE)
    assert q.scale_inv.shape == (6, 2)
    with pytest.raises(ConfigError, match="no columnwise copy, only rowwise"):
        _ = q.columnwise_scale_inv


@own
def test_gemms_multiply_what_ones_own_stands_for(quantizer):
    x = tensors((6, 40))
    for held in ORIENTATIONS:
        parts = quantizer.quantize(x, held)
        for wanted, layout in ((fg.ROWWISE, PLAIN), (fg.COLUMNWISE, NATIVE)):
            operand = quantizer.operand(parts, wanted, layout)
            values = reference.decode_operand(operand)
            wanted_x = x.float() if wanted is fg.ROWWISE else x.float().t()
            inside = values[:, : wanted_x.shape[1]]
            assert (inside - wanted_x).norm() < 0.08 * wanted_x.norm()
            assert (values.dtype, operand.scaling) == (torch.float32, quantizer.scaling)


@dataclasses.dataclass(frozen=True)
class OwnRecipe(fg.recipes.Recipe):
    """A recipe of one's own that uses one for every role."""

    own: fg.Quantizer

    def quantizer(self, role):
        return self.own


@own
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_recipe_of_ones_own(where, quantizer):
    layer = fg.Linear(40, 24, dtype=torch.bfloat16)
    x, grad_output = batch(19, 40, 24)

    def function(x):
        if where == "outside":
            return layer(x)
        with fg.autocast(OwnRecipe(quantizer)):
            return layer(x)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    with fg.autocast(OwnRecipe(quantizer)):
        results = [step(layer, x, grad_output, f) for f in (function, compiled)]
    for name, value in results[0].items():
        assert_same_bits(results[1][name], value)
    copies = {
        name: [
            quantizer.decode_matrix(quantizer.quantize(t.detach(), copy), copy).double()
            for copy in (fg.ROWWISE, fg.COLUMNWISE)
        ]
        for name, t in (("x", x), ("w", layer.weight), ("g", grad_output))
    }
    expected = {
        "output": copies["x"][0] @ copies["w"][0].t() + layer.bias.double(),
        "grad_input": copies["g"][0] @ copies["w"][1].t(),
        "weight": copies["g"][1] @ copies["x"][1].t(),
    }
    exact = x.double() @ layer.weight.double().t() + layer.bias.double()
    assert 1e-3 < oracles.relative_error(results[0]["output"], exact) < 0.06
    for name, value in expected.items():
        found = results[0].get(name, results[0].get(f"grad_{name}"))
        assert oracles.relative_error(found, value) < 4e-3, name


@own
def test_a_quantized_weight_and_output_of_ones_own(quantizer):
    layer = fg.Linear(40, 24, recipe=OwnRecipe(quantizer), quantized_weight=True)
    assert layer.weight.quantizer == quantizer
    x = torch.randn(2, 5, 40)
    output = layer(x, quantized_output=True)
    assert output.quantizer == quantizer
    plain = layer(x)
    assert oracles.relative_error(output.dequantize(), plain) < 0.06
    (plain * torch.randn_like(plain)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert not torch.equal(layer(x), plain)


@dataclasses.dataclass(frozen=True)
class Nothing(fg.Quantizer):
    """One that defines nothing."""

    format: fg.Format = fg.Format.E4M3


@dataclasses.dataclass(frozen=True)
class NoDecoding(GridQuantizer):
    """One that cannot be read."""

    decode_matrix = fg.Quantizer.decode_matrix


def test_what_ones_own_must_define():
    with pytest.raises(NotImplementedError, match=r"Nothing must define spec\(...\)"):
        fg.quantize(torch.ones(2, 3), Nothing())
    with pytest.raises(NotImplementedError, match=r"Nothing must define quantize\(...\)"):
        Nothing().quantize(torch.ones(2, 3), fg.ROWWISE)
    with pytest.raises(NotImplementedError, match=r"NoDecoding must define decode_matrix\(...\)"):
        fg.quantize(torch.ones(2, 3), NoDecoding()).dequantize()
