"""What quantizers promise: specs to plans and operands to GEMMs, in every layout."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fullgraph as fg
from fullgraph import gemm, reference
from fullgraph.customop.structured import flatten, to_spec
from fullgraph.formats import Scaling
from fullgraph.tensor import PLAIN, Layout, QuantizedParts
from linear_cases import tensors
from oracles import assert_same_bits
from oracles_quantizers import (
    CASES,
    QUANTIZERS,
    SHAPES,
    Expected,
    assert_same_fields,
    expected,
    sample,
    state_of,
)

LAYOUTS = {
    "plain": PLAIN,
    "ada": gemm.layout_of((8, 9)),
    "hopper": gemm.layout_of((9, 0)),
    "blackwell": gemm.layout_of((10, 0)),
    "all": Layout(frozenset(Scaling)),
}
MATRICES = [(24, 40), (16, 32), (128, 256), (1, 7), (7, 1), (1, 1), (0, 5), (5, 0), (0, 0)]
BF16 = torch.bfloat16
by_name = {"ids": lambda o: o.name if isinstance(o, fg.Orientation) else str(o)}
by_case = pytest.mark.parametrize(("name", "orientation"), CASES, **by_name)


# Plans.


@pytest.mark.parametrize("layout", LAYOUTS)
@by_case
def test_the_spec_is_what_comes(name, orientation, layout):
    quantizer, layout = QUANTIZERS[name], LAYOUTS[layout]
    for shape in MATRICES if layout != PLAIN else MATRICES + SHAPES:
        x = torch.randn(shape)
        real = quantizer.quantize(x, orientation, layout, state_of(quantizer))
        assert to_spec(real) == quantizer.spec(shape, x.dtype, x.device, orientation, layout)
        assert all(t.is_contiguous() for t in flatten(real))
        storages = [t.untyped_storage().data_ptr() for t in flatten(real) if t.numel()]
        assert len(set(storages)) == len(storages)
        if layout == PLAIN:
            assert tuple(real.shape) == shape


@by_case
def test_specs_of_symbolic_sizes(name, orientation):
    """A spec must not ask what a size is, or each size would have a graph of its own."""
    shape_env = ShapeEnv()
    fake = FakeTensorMode(shape_env=shape_env)
    symbolic = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 3)
    x = fake.from_tensor(torch.randn(2, 24, 40), symbolic_context=symbolic)
    for layout in LAYOUTS.values():
        spec = QUANTIZERS[name].spec(tuple(x.shape), x.dtype, x.device, orientation, layout)
        assert flatten(spec)
    assert not shape_env.guards


@pytest.mark.parametrize("layout", LAYOUTS)
@by_case
def test_one_copy_of_two_is_what_would_come_alone(name, orientation, layout):
    quantizer, layout = QUANTIZERS[name], LAYOUTS[layout]
    parts = quantizer.quantize(torch.randn(3, 7), orientation, layout, state_of(quantizer))
    assert isinstance(parts, QuantizedParts)
    assert parts.orientation is orientation
    for kept in (fg.ROWWISE, fg.COLUMNWISE):
        if orientation not in (kept, fg.BOTH):
            continue
        only = parts.only(kept)
        assert only.orientation is kept
        spec = quantizer.spec((3, 7), torch.float32, parts.device, kept, layout)
        assert to_spec(only) == spec
        if layout == PLAIN:
            values = quantizer.decode_matrix(only, kept)
            assert_same_bits(values, quantizer.decode_matrix(parts, kept))


# GEMMs.


def assert_same_operand(operand, copy):
    """Codes and scales are those of a copy of the oracle."""
    for field in ("data", "scale_inv", "tensor_scale_inv"):
        actual, wanted = getattr(operand, field), getattr(copy, field)
        assert (actual is None) == (wanted is None)
        if wanted is not None:
            assert_same_bits(actual, wanted)
            assert actual.is_contiguous()


@pytest.mark.parametrize("layout", ["hopper", "blackwell", "all"])
@by_case
def test_copies_made_in_a_layout_are_read_in_it(name, orientation, layout):
    """The way of the linear op: cast in the layout of the device, one copy saved, and read."""
    quantizer, layout = QUANTIZERS[name], LAYOUTS[layout]
    shape = (18, 33)
    parts = quantizer.quantize(sample(shape, BF16), orientation, layout, state_of(quantizer))
    made = expected(name, shape, BF16, layout.native)
    assert_same_fields(parts, made.parts(orientation))
    for wanted, copy in ((fg.ROWWISE, made.rowwise), (fg.COLUMNWISE, made.columnwise)):
        if orientation not in (wanted, fg.BOTH):
            continue
        operand = quantizer.operand(parts.only(wanted), wanted, layout)
        assert_same_operand(operand, copy)
        if quantizer.rotates and wanted is fg.COLUMNWISE:
            continue  # its values are rotated
        values = reference.decode_operand(operand)
        contraction = copy.values.shape[1]
        assert_same_bits(values[:, :contraction], copy.values)
        assert not values[:, contraction:].any()


@pytest.mark.parametrize("layout", ["plain", "hopper", "blackwell"])
@by_case
def test_a_gemm_gets_the_copy_it_reads(name, orientation, layout):
    """Also where it was not made: then it is the other one transposed, or cast from the values of the other one."""
    quantizer, layout = QUANTIZERS[name], LAYOUTS[layout]
    for shape in ((5, 33), (2, 3, 17), (18,)):
        x = sample(shape, BF16)
        parts = quantizer.quantize(x, orientation, state=state_of(quantizer))
        made = expected(name, shape, BF16, layout.native)
        for wanted in (fg.ROWWISE, fg.COLUMNWISE):
            member = quantizer.for_copy(wanted)
            if member is None:
                continue
            operand = quantizer.operand(parts, wanted, layout)
            source = made
            shares = isinstance(quantizer, fg.PerTensorQuantizer)
            if not shares and orientation not in (wanted, fg.BOTH):
                # A stochastic one rounds to the nearest here: there is no seed.
                source = Expected(member, made.values(orientation), native=layout.native)
            copy = source.rowwise if wanted is fg.ROWWISE else source.columnwise
            assert (operand.scaling, operand.format) == (member.scaling, member.format)
            assert_same_operand(operand, copy)


@pytest.mark.parametrize("orientation", list(fg.Orientation), **by_name)
@pytest.mark.parametrize("shape", [(24,), (6, 40), (2, 3, 40)], ids=str)
@pytest.mark.parametrize("name", ["per-tensor", "block-2d", "mx-2d", "nvfp4-2d"])
def test_copies_that_are_transposes_decode_to_the_same(name, shape, orientation):
    x = tensors(shape)
    rowwise = fg.quantize(x, QUANTIZERS[name], fg.ROWWISE).dequantize()
    got = fg.quantize(x, QUANTIZERS[name], orientation).dequantize()
    assert got.shape == x.shape
    assert torch.equal(got, rowwise)
