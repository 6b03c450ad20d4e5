"""What quantizers promise: specs to plans, operands to GEMMs, the same bytes to compiled code; in every layout."""

import pytest
import torch
from torch._dynamo.utils import counters

import fullgraph as fg
from fullgraph import gemm, reference
from fullgraph.customop.structured import flatten, to_spec
from fullgraph.formats import Scaling
from fullgraph.tensor import PLAIN, Layout, QuantizedParts
from linear_cases import tensors
from oracles import assert_same_bits
from oracles_quantizers import (
    CASES,
    FIELDS,
    QUANTIZERS,
    SHAPES,
    Expected,
    assert_same_fields,
    expected,
    orientations_of,
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
    shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    fake = torch._subclasses.FakeTensorMode(shape_env=shape_env)
    symbolic = torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(
        [torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC] * 2
    )
    x = fake.from_tensor(torch.randn(24, 40), symbolic_context=symbolic)
    for layout in LAYOUTS.values():
        spec = QUANTIZERS[name].spec(tuple(x.shape), x.dtype, x.device, orientation, layout)
        assert all(not s.device.type == "meta" for s in flatten(spec))
    assert not shape_env.guards


@pytest.mark.parametrize("name", QUANTIZERS)
def test_parts_hold_what_was_asked_for(name):
    quantizer = QUANTIZERS[name]
    for orientation in orientations_of(quantizer):
        parts = quantizer.quantize(torch.randn(3, 7), orientation)
        assert isinstance(parts, QuantizedParts)
        assert parts.orientation is orientation
        assert parts.device.type == "cpu"
        for kept in (fg.ROWWISE, fg.COLUMNWISE):
            if orientation not in (kept, fg.BOTH):
                continue
            only = parts.only(kept)
            alone = quantizer.quantize(torch.zeros(3, 7), kept)
            assert only.orientation is kept
            assert tuple(only.shape) == (3, 7)
            assert [getattr(only, f) is None for f in FIELDS] == [
                getattr(alone, f) is None for f in FIELDS
            ]
            assert_same_bits(
                quantizer.decode_matrix(only, kept), quantizer.decode_matrix(parts, kept)
            )


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
                source = Expected(quantizer, made.values(orientation), native=layout.native)
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


# Compiled code.


def assert_compiled_equals_eager(function, backend, shapes):
    """Values, gradients and every stored byte, in one graph for all shapes."""
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for shape in shapes:
        x, results = tensors(shape), []
        for run in (function, compiled):
            leaf = x.detach().requires_grad_()
            torch.manual_seed(5)
            q, values = run(leaf)
            (values * 2).sum().backward()
            results.append((values.detach(), leaf.grad, *flatten(q)))
        for ours, theirs in zip(*results, strict=True):
            assert_same_bits(ours, theirs)
    assert counters["stats"]["unique_graphs"] == 1


# Every quantizer with both copies; single copies of one for each way to store them.
COMPILED = [
    (name, orientation)
    for name, orientation in CASES
    if orientation is orientations_of(QUANTIZERS[name])[-1]
    or name in ("per-tensor", "block", "nvfp4", "hybrid-nvfp4-mx")
]


@pytest.mark.parametrize(("name", "orientation"), COMPILED, **by_name)
def test_compiled_equals_eager(name, orientation):
    quantizer = QUANTIZERS[name]

    def both(x):
        q = fg.quantize(x, quantizer, orientation)
        return q, q.dequantize()

    # Also sizes of one block, and of one row: what torch would take for constants.
    assert_compiled_equals_eager(both, "aot_eager", [(6, 40), (2, 16), (33, 50)])


# Inductor only ever sees the op, so its own code is the same for all of them.
@pytest.mark.parametrize("name", ["per-tensor", "nvfp4-hadamard-stochastic", "hybrid-again"])
def test_compiled_by_inductor(name):
    def both(x):
        q = fg.quantize(x * 3, QUANTIZERS[name], fg.BOTH)
        return q, q.dequantize()

    assert_compiled_equals_eager(both, "inductor", [(2, 3, 40), (3, 5, 50)])


def test_a_quantizer_made_in_a_compiled_function():
    def both(x):
        first = fg.NVFP4Quantizer(two_dimensional=True)
        q = fg.quantize(x, fg.HybridQuantizer(first, fg.MXQuantizer(fg.Format.E5M2)), fg.BOTH)
        return q, q.dequantize()

    assert_compiled_equals_eager(both, "aot_eager", [(6, 40), (9, 50)])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["nvfp4-stochastic", "hybrid-again-stochastic"])
def test_compiled_code_draws_what_eager_code_draws(name, backend):
    def twice(x):
        return fg.quantize(x, QUANTIZERS[name]), fg.quantize(x, QUANTIZERS[name])

    x, draws = torch.randn(32, 64), []
    compiled = torch.compile(twice, backend=backend, fullgraph=True)
    for run, seed in ((twice, 1), (compiled, 1), (compiled, 1), (compiled, 2)):
        torch.manual_seed(seed)
        draws.append([q.part_data for q in run(x)])
    for repeated in draws[1:3]:
        for ours, theirs in zip(repeated, draws[0], strict=True):
            assert_same_bits(ours, theirs)
    assert len({d.numpy().tobytes() for pair in draws for d in pair}) == 4
