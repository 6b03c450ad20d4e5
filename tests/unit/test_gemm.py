"""Which GEMM is chosen, and that the native one is called as CUDA devices demand.

Here a stand-in checks the calls (tests/scaled_mm.py); this torch's own scaled_mm for CPUs, where it has one, checks
that such calls run. The real devices are in tests/gpu/test_gemm_gpu.py.
"""

import dataclasses
import inspect
import itertools
import warnings

import pytest
import torch
from torch.nn.functional import ScalingType

import fullgraph as fg
import oracles
from fullgraph import gemm as gemm_module
from fullgraph import kernels, reference
from fullgraph.customop import token
from fullgraph.errors import EmulationWarning, HardwareError
from fullgraph.formats import Format, Scaling
from fullgraph.gemm import GemmBackend, Kind, gemm, layout_of, select
from linear_cases import batch, step
from oracles_quantizers import QUANTIZERS, Expected
from scaled_mm import pretend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
E4M3, E5M2, E2M1 = Format.E4M3, Format.E5M2, Format.E2M1
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
NATIVE, REFERENCE = GemmBackend.NATIVE, GemmBackend.REFERENCE
ADA, HOPPER, BLACKWELL, GEFORCE = (8, 9), (9, 0), (10, 0), (12, 0)
DEVICES = [(0, 0), (8, 0), ADA, HOPPER, BLACKWELL, GEFORCE]
SCALINGS = [s for s in Scaling if s is not Scaling.CUSTOM]
OUTER = (Scaling.TENSOR, Scaling.ROW)


@pytest.fixture(autouse=True)
def no_plans_of_other_devices():
    """Neither into a test nor out of it: a CPU has one compute capability for good, and plans rely on it."""
    yield
    for cache in token.CACHES:
        cache.clear()


def kind_of(quantizer):
    return Kind(quantizer.format, quantizer.scaling)


# The choice.


def expected_native(capability):
    """The pairs of kinds in the table of the module, written down once more."""
    fp8 = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
    pairs = []
    if capability >= ADA:
        pairs += [(a, b, f) for a in OUTER for b in OUTER for f in fp8]
    if capability == HOPPER:
        pairs += [
            (Scaling.BLOCK_1X128, b, (E4M3, E4M3))
            for b in (Scaling.BLOCK_1X128, Scaling.BLOCK_128X128)
        ]
    if capability == BLACKWELL:
        pairs += [(Scaling.BLOCK_1X32, Scaling.BLOCK_1X32, f) for f in fp8]
        pairs += [(Scaling.BLOCK_1X16, Scaling.BLOCK_1X16, (E2M1, E2M1))]
    return {(Kind(f[0], a), Kind(f[1], b)) for a, b, f in pairs}


@pytest.mark.filterwarnings("ignore::fullgraph.errors.EmulationWarning")
@pytest.mark.parametrize("capability", DEVICES)
def test_choice_by_device_formats_and_scalings(monkeypatch, capability):
    monkeypatch.setattr(gemm_module, "compute_capability", lambda device: capability)
    kinds = [Kind(f, s) for f in (E4M3, E5M2, E2M1) for s in SCALINGS]
    kinds.append(Kind(None, Scaling.CUSTOM))
    native = {(a, b) for a, b in itertools.product(kinds, kinds) if select(GPU, a, b) is NATIVE}
    assert native == expected_native(capability)
    for a, b in itertools.product(kinds, kinds):
        if (a, b) in native:
            assert select(GPU, a, b, allow_emulation=False) is NATIVE
        else:
            with pytest.raises(HardwareError, match=f"does not multiply {a} by {b} natively"):
                select(GPU, a, b, allow_emulation=False)


@pytest.mark.parametrize("capability", DEVICES)
def test_layout_of_a_device(capability):
    layout = layout_of(capability)
    expected = {a.scaling for pair in expected_native(capability) for a in pair}
    assert layout.native == expected
    alignments = {
        Scaling.TENSOR: 16,
        Scaling.ROW: 16,
        Scaling.BLOCK_1X128: 128,
        Scaling.BLOCK_128X128: 128,
        Scaling.BLOCK_1X32: 32,
        Scaling.BLOCK_1X16: 32,
        Scaling.CUSTOM: 1,
    }
    for scaling, alignment in alignments.items():
        is_native = scaling in expected
        assert layout.pad(scaling) == (alignment if is_native else 1)
        swizzled = scaling in (Scaling.BLOCK_1X32, Scaling.BLOCK_1X16)
        assert layout.swizzles(scaling) == (is_native and swizzled)


@pytest.mark.parametrize(
    ("version", "has_blocks"),
    [("12.6", False), ("12.8", False), ("12.9", True), ("13.0", True), (None, True)],
)
def test_blocks_of_hopper_came_with_cublas_12_9(monkeypatch, version, has_blocks):
    monkeypatch.setattr(torch.version, "cuda", version)
    native = layout_of.__wrapped__(HOPPER).native
    assert (Scaling.BLOCK_1X128 in native) == (Scaling.BLOCK_128X128 in native) == has_blocks
    assert native.issuperset(OUTER)


def test_choice_on_a_cpu():
    kind = Kind(E4M3, Scaling.TENSOR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select(CPU, kind, kind) is REFERENCE
    assert kernels.compute_capability(CPU) == (0, 0)
    assert not kernels.available(CPU)
    assert gemm_module.layout(CPU).native == frozenset()
    with pytest.raises(
        HardwareError,
        match=r"gemm: cpu does not multiply E4M3 per tensor by E4M3 per tensor natively\n"
        r"Why: the recipe was made with allow_emulation=False\nDo: allow emulation",
    ):
        select(CPU, kind, kind, allow_emulation=False)


def test_an_emulation_warns_once_for_each_kind(monkeypatch):
    monkeypatch.setattr(gemm_module, "compute_capability", lambda device: HOPPER)
    gemm_module._warn_of_emulation.cache_clear()
    mx, custom = Kind(E4M3, Scaling.BLOCK_1X32), Kind(None, Scaling.CUSTOM)
    for pair, message in (
        ((mx, mx), "cuda:0 does not multiply E4M3 1x32 by E4M3 1x32 natively: emulated"),
        ((mx, custom), "cuda:0 does not multiply E4M3 1x32 by decoded values natively"),
    ):
        with pytest.warns(EmulationWarning, match=message):
            assert select(GPU, *pair) is REFERENCE
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert select(GPU, *pair) is REFERENCE
    gemm_module._warn_of_emulation.cache_clear()


def test_a_recipe_may_refuse_emulation():
    recipe = fg.recipes.Float8CurrentScaling(allow_emulation=False)
    layer = fg.Linear(48, 32, recipe=recipe)
    with pytest.raises(HardwareError, match="cpu does not multiply E4M3 per tensor"):
        layer(torch.randn(3, 48))
    recipe = dataclasses.replace(recipe, backward_override=fg.recipes.BackwardOverride.DEQUANTIZED)
    with pytest.raises(HardwareError, match="cpu does not multiply E4M3 per tensor"):
        fg.linear(torch.randn(3, 48), torch.randn(32, 48), recipe=recipe)


# The native call.

PAIRS = {
    "tensor by tensor": ("per-tensor", "per-tensor"),
    "E5M2 tensor by tensor": ("per-tensor-options", "per-tensor"),
    "tensor by E5M2 tensor": ("per-tensor", "per-tensor-options"),
    "rows by rows": ("per-row", "per-row"),
    "E5M2 rows by rows": ("per-row-options", "per-row"),
    "rows by E5M2 rows": ("per-row", "per-row-options"),
    "rows by tensor": ("per-row", "per-tensor"),
    "tensor by rows": ("per-tensor", "per-row"),
    "E5M2 tensor by rows": ("per-tensor-options", "per-row"),
    "blocks by blocks": ("block", "block"),
    "blocks by squares": ("block", "block-2d"),
    "MX by MX": ("mx", "mx-2d"),
    "E5M2 MX by MX": ("mx-ceil", "mx"),
    "NVFP4 by NVFP4": ("nvfp4", "nvfp4-2d"),
    "NVFP4 rows by NVFP4": ("nvfp4-rows", "nvfp4-4over6-mae"),
    "NVFP4 by NVFP4 rows": ("nvfp4", "nvfp4-rows"),
    "NVFP4 rows by NVFP4 rows": ("nvfp4-rows-4over6", "nvfp4-rows"),
}
NATIVE_PAIRS = [
    (capability, name)
    for capability in (ADA, HOPPER, BLACKWELL, GEFORCE)
    for name, pair in PAIRS.items()
    if tuple(kind_of(QUANTIZERS[q]) for q in pair) in expected_native(capability)
]
# Rows that fill nothing, exactly one tile of scales, one more; a contraction of one block, of many; each size empty.
NATIVE_SHAPES = [(5, 50, 7), (1, 1, 1), (13, 300, 130), (0, 16, 16), (16, 0, 20), (16, 16, 0)]


def native_operand(name, x, layout):
    quantizer = QUANTIZERS[name]
    parts = quantizer.quantize(x, fg.ROWWISE, layout)
    return quantizer.operand(parts, fg.ROWWISE, layout)


@pytest.mark.parametrize(("capability", "pair"), NATIVE_PAIRS, ids=str)
def test_native_calls_follow_the_rules_of_the_device(monkeypatch, capability, pair):
    strict = pretend(monkeypatch, capability)
    left, right = PAIRS[pair]
    layout = gemm_module.layout(GPU)
    backend = select(GPU, kind_of(QUANTIZERS[left]), kind_of(QUANTIZERS[right]))
    assert backend is NATIVE
    for m, k, n in NATIVE_SHAPES:
        x, w = torch.randn(m, k), 0.02 * torch.randn(n, k)
        a, b = native_operand(left, x, layout), native_operand(right, w, layout)
        exact = reference.decode_operand(a).double() @ reference.decode_operand(b).double().t()
        if m * k < 1000:  # the oracle is slow; its codes are compared elsewhere
            values = [Expected(QUANTIZERS[q], t).rowwise.values for q, t in ((left, x), (right, w))]
            assert torch.allclose(exact, torch.from_numpy(values[0].astype("f8") @ values[1].T))
        for out_dtype, bias_dtype, split in itertools.product(
            TOLERANCE, (None, *TOLERANCE), (False, True)
        ):
            bias = None if bias_dtype is None else torch.randn(n).to(bias_dtype)
            expected = exact if bias is None else exact + bias.double()
            before = len(strict.calls)
            actual = gemm(backend, a, b, bias=bias, out_dtype=out_dtype, split_accumulator=split)
            assert len(strict.calls) == before + 1
            assert (actual.dtype, actual.shape) == (out_dtype, (m, n))
            assert actual.is_contiguous()
            if expected.count_nonzero():
                assert oracles.relative_error(actual, expected) <= TOLERANCE[out_dtype]
            else:
                assert not actual.count_nonzero()
            call = strict.calls[-1]
            fast = not split and QUANTIZERS[left].scaling in OUTER
            assert call["use_fast_accum"] == fast
            assert call["shapes"][1][1] == -(-n // 16) * 16


@pytest.mark.parametrize("capability", [ADA, HOPPER, BLACKWELL, GEFORCE])
def test_scales_of_rows_are_multiplied_where_the_device_does(monkeypatch, capability):
    """Only Hopper does it for every format and output; others are given no chance to refuse."""
    strict = pretend(monkeypatch, capability)
    layout = gemm_module.layout(GPU)
    rows = native_operand("per-row", torch.randn(32, 64), layout)
    e5m2 = native_operand("per-row-options", torch.randn(32, 64), layout)
    for b, out_dtype in itertools.product((rows, e5m2), TOLERANCE):
        gemm(NATIVE, rows, b, out_dtype=out_dtype)
        by_device = capability == HOPPER or (b is rows and out_dtype == torch.bfloat16)
        recipe = ScalingType.RowWise if by_device else ScalingType.TensorWise
        assert strict.calls[-1]["recipes"] == (recipe, recipe)
        assert strict.calls[-1]["output_dtype"] == (out_dtype if by_device else torch.float32)


def test_rows_on_hopper_before_cublas_12_9(monkeypatch):
    strict = pretend(monkeypatch, HOPPER)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    rows = native_operand("per-row", torch.randn(32, 64), gemm_module.layout(GPU))
    for out_dtype, recipe in (
        (torch.bfloat16, ScalingType.RowWise),
        (torch.float32, ScalingType.TensorWise),
    ):
        gemm(NATIVE, rows, rows, out_dtype=out_dtype)
        assert strict.calls[-1]["recipes"] == (recipe, recipe)


@pytest.mark.parametrize("pair", ["tensor by tensor", "rows by rows", "blocks by blocks"])
def test_biases_that_the_device_adds(monkeypatch, pair):
    """Of 16 bits, to an output of the same dtype; others are added in float32 to an output in float32."""
    strict = pretend(monkeypatch, HOPPER)
    a, b = (
        native_operand(name, torch.randn(20, 128), gemm_module.layout(GPU)) for name in PAIRS[pair]
    )
    for out_dtype, bias_dtype in itertools.product(TOLERANCE, TOLERANCE):
        bias = torch.randn(20).to(bias_dtype)
        gemm(NATIVE, a, b, bias=bias, out_dtype=out_dtype)
        call = strict.calls[-1]
        added = out_dtype == bias_dtype != torch.float32
        assert (call["bias"] is not None) == added
        assert call["output_dtype"] == (out_dtype if added else torch.float32)


def test_misaligned_codes_are_copied(monkeypatch):
    pretend(monkeypatch, HOPPER)
    operand = native_operand("per-tensor", torch.randn(32, 64), gemm_module.layout(GPU))
    wide = torch.zeros(32 * 64 + 1, dtype=torch.uint8)
    shifted = wide[1:].view(32, 64).copy_(operand.data)
    assert shifted.data_ptr() % 16
    moved = dataclasses.replace(operand, data=shifted)
    expected = gemm(NATIVE, operand, operand)
    assert torch.equal(gemm(NATIVE, moved, moved), expected)


WRONG = {
    "rows of b": lambda o: dataclasses.replace(o, data=o.data[:-8], scale_inv=o.scale_inv),
    "contraction": lambda o: dataclasses.replace(o, data=o.data[:, :-3].contiguous()),
    "plain scales": lambda o: dataclasses.replace(o, scale_inv=o.scale_inv[:-1]),
    "dtype of scales": lambda o: dataclasses.replace(o, scale_inv=o.scale_inv.to(torch.int32)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("name", "capability"),
    [("per-row", HOPPER), ("block", HOPPER), ("mx", BLACKWELL), ("nvfp4", BLACKWELL)],
)
def test_the_stand_in_refuses_what_devices_refuse(monkeypatch, name, capability, wrong):
    strict = pretend(monkeypatch, capability)
    operand = native_operand(name, torch.randn(32, 128), gemm_module.layout(GPU))
    options = {"bias": None, "out_dtype": torch.bfloat16, "use_fast_accum": False}
    gemm_module._scaled_mm(operand, operand, *options.values())
    with pytest.raises((AssertionError, RuntimeError)):
        gemm_module._scaled_mm(operand, WRONG[wrong](operand), *options.values())
    strict.capability = ADA
    if name != "per-row":
        with pytest.raises(AssertionError, match=r"on \(8, 9\)"):
            gemm_module._scaled_mm(operand, operand, *options.values())


# Whole layers, as on such a device.


@pytest.mark.filterwarnings("ignore::fullgraph.errors.EmulationWarning")
@pytest.mark.parametrize("recipe", [n for n in fg.recipes.BY_NAME if n != "bf16"])
@pytest.mark.parametrize("capability", [ADA, HOPPER, BLACKWELL, GEFORCE])
def test_layers_multiply_natively(monkeypatch, capability, recipe):
    """The values of the emulation, but for the rounding of sums, from native GEMMs wherever there are any."""
    natives = {
        "fp8-block": HOPPER,
        "mxfp8": BLACKWELL,
        "nvfp4": BLACKWELL,
    }
    for dtype, shape in ((torch.bfloat16, (19, 40, 24)), (torch.float32, (130, 136, 33))):
        layer = fg.Linear(*shape[1:], dtype=dtype, recipe=recipe)
        x, grad_output = batch(*shape, dtype=dtype)
        expected = step(layer, x, grad_output)
        with monkeypatch.context() as patch:
            strict = pretend(patch, capability)
            actual = step(layer, x, grad_output)
        for cache in token.CACHES:
            cache.clear()
        is_native = natives.get(recipe, capability) == capability
        assert len(strict.calls) == (3 if is_native else 0)
        for name, value in expected.items():
            assert oracles.relative_error(actual[name], value) <= 1.5 * TOLERANCE[dtype], name


def test_quantized_tensors_are_multiplied_natively_as_they_are(monkeypatch):
    """They come neither padded nor swizzled."""
    x, weight = torch.randn(5, 40), torch.randn(24, 40)
    for name, capability in (
        ("per-tensor", ADA),
        ("per-row", HOPPER),
        ("block", HOPPER),
        ("mx", BLACKWELL),
        ("nvfp4", BLACKWELL),
    ):
        recipe = fg.recipes.CustomRecipe(lambda role, name=name: QUANTIZERS[name])
        q, w = fg.quantize(x, QUANTIZERS[name]), fg.quantize(weight, QUANTIZERS[name], fg.BOTH)
        expected = fg.linear(q, w, recipe=recipe)
        with monkeypatch.context() as patch:
            strict = pretend(patch, capability)
            actual = fg.linear(q, w, recipe=recipe)
        for cache in token.CACHES:
            cache.clear()
        assert len(strict.calls) == 1
        assert oracles.relative_error(actual, expected) <= TOLERANCE[torch.float32]


# This torch's own routine for CPUs, where it has one.


def quantized(x, format):
    quantizer = fg.PerTensorQuantizer(format)
    layout = layout_of(HOPPER)
    return quantizer.operand(quantizer.quantize(x, fg.ROWWISE, layout), fg.ROWWISE, layout)


def runs_native_on_cpu():
    a = quantized(torch.ones(16, 16), E4M3)
    try:
        gemm(NATIVE, a, a)
    except NotImplementedError:
        return False
    return True


native_on_cpu = pytest.mark.skipif(
    not runs_native_on_cpu(), reason="this torch has no scaled_mm for CPUs"
)


@pytest.mark.parametrize("backend", [REFERENCE, pytest.param(NATIVE, marks=native_on_cpu)])
# Full, with rows that the native routine pads, and with each of the sizes empty.
@pytest.mark.parametrize(
    "shape", [(32, 48, 16), (5, 48, 7), (0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str
)
def test_against_float64(backend, shape):
    m, k, n = shape
    a, b = quantized(torch.randn(m, k), E5M2), quantized(0.02 * torch.randn(n, k), E4M3)
    exact = reference.decode_operand(a).double() @ reference.decode_operand(b).double().t()
    full = torch.randn(n)
    for out_dtype, tolerance in TOLERANCE.items():
        for bias in (None, full, full.to(out_dtype), full.bfloat16(), full.half()):
            expected = exact.clone()
            if bias is not None:
                expected += bias.double()
            for split in (False, True):
                actual = gemm(
                    backend, a, b, bias=bias, out_dtype=out_dtype, split_accumulator=split
                )
                assert (actual.dtype, tuple(actual.shape)) == (out_dtype, (m, n))
                assert actual.is_contiguous()
                if expected.count_nonzero():
                    assert oracles.relative_error(actual, expected) <= tolerance
                else:
                    assert not actual.count_nonzero()


@native_on_cpu
@pytest.mark.parametrize("pair", ["rows by rows", "E5M2 rows by rows", "rows by tensor"])
@pytest.mark.parametrize("capability", [ADA, HOPPER])
def test_rows_on_a_cpu(monkeypatch, pair, capability):
    monkeypatch.setattr(gemm_module, "compute_capability", lambda device: capability)
    x, w = torch.randn(5, 48), torch.randn(7, 48)
    operands = [
        native_operand(q, t, layout_of(ADA)) for q, t in zip(PAIRS[pair], (x, w), strict=True)
    ]
    values = [reference.decode_operand(o).double() for o in operands]
    for out_dtype, tolerance in TOLERANCE.items():
        actual = gemm(NATIVE, *operands, bias=torch.ones(7), out_dtype=out_dtype)
        expected = values[0] @ values[1].t() + 1
        assert oracles.relative_error(actual, expected) <= tolerance


def test_nothing_calls_the_slow_cpu_op():
    for module in (gemm_module, inspect.getmodule(reference.gemm_upcast)):
        assert "torch._scaled_mm(" not in inspect.getsource(module)
