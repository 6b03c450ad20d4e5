"""The NVFP4 kernel without a GPU: its arithmetic under Triton's interpreter, its instructions as compiled for Hopper.

The interpreter must be chosen before Triton is imported, so this file runs itself in a second process. The
interpreter's own casts between float32 and fp8 are not those of a GPU, so the two functions that cast the scales are
replaced by others that work on bits; all else is compared as it is.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402

SOURCES = Path(__file__).parents[2] / "src"
NAN, INF = float("nan"), float("inf")

# One element, a whole tile (64 x 64), more than one tile each way, nothing at all.
SHAPES = [(1, 1), (64, 64), (70, 150), (0, 5), (5, 0)]


@triton.jit
def encode_scales(x, factor):
    """E4M3 codes by the bits of float32."""
    value = x * factor
    value = tl.where(value > 448.0, 448.0, value)
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + (0x7FFFF + ((bits >> 20) & 1))) >> 20) - (120 << 3)
    # Beside 2^14, float32 has the spacing of the subnormals, 2^-9.
    subnormal = (value + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(x != x, 0x7F, tl.where(value < 0.015625, subnormal, normal))


@triton.jit
def decode_scales(scale_inv):
    """The inverse."""
    code = scale_inv.to(tl.int32)
    normal = (((code >> 3) + 120) << 23 | (code & 7) << 20).to(tl.float32, bitcast=True)
    value = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
    return tl.where(code == 0x7F, float("nan"), value)


def run(*arguments, **environment):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES), *sys.path]),
    } | environment
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("check", ["shapes", "layouts", "values"])
def test_interpreted(check):
    result = run(__file__, check, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{check} ok\n"


def test_a_difference_is_noticed():
    result = run(__file__, "broken", TRITON_INTERPRET="1")
    assert "differ, first at" in result.stderr


def test_errors_are_those_of_the_reference():
    import torch

    from fullgraph import kernels
    from fullgraph.errors import ConfigError, ShapeError
    from fullgraph.formats import FourOverSix

    with pytest.raises(ShapeError, match=r"a matrix is needed \(x: float32\[2, 3, 4\]\)"):
        kernels.cast_nvfp4(torch.ones(2, 3, 4))
    with pytest.raises(ConfigError, match="four_over_six and hadamard exclude each other"):
        kernels.cast_nvfp4(torch.ones(2, 3), four_over_six=FourOverSix.MAE, hadamard=True)


# The instructions.

CAST = {
    "plain": {},
    "squares": {"TWO_DIMENSIONAL": True},
    "stochastic": {"HADAMARD": True, "ROW_SCALED": True},
    "four over six": {"FOUR_OVER_SIX": True, "SQUARED_ERROR": True, "SWIZZLED": True},
}


def compile_cast(monkeypatch, tmp_path, options, input_type):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fullgraph.kernels import nvfp4

    kernel = nvfp4._cast_kernel
    bytes_of = ("data", "columnwise_data", "scale_inv", "columnwise_scale_inv")
    floats_of = ("amax", "columnwise_amax", "tensor_scale_inv", "columnwise_tensor_scale_inv")
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {f"{name}_ptr": "*u8" for name in bytes_of}
    types |= {f"{name}_ptr": "*fp32" for name in floats_of}
    types |= {"x_ptr": input_type, "seed_ptr": "*i64"}
    constants = {
        "stride_column": 1,
        "TWO_DIMENSIONAL": False,
        "HADAMARD": False,
        "FOUR_OVER_SIX": False,
        "SQUARED_ERROR": False,
        "LARGEST": 2688.0,
        "ROW_SCALED": False,
        "SWIZZLED": False,
        "PAD": 32,
        "TILE_M": nvfp4._TILE[0],
        "TILE_K": nvfp4._TILE[1],
        **({} if options == "stochastic" else {"seed_ptr": None}),
        **CAST[options],
    }
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": nvfp4._NUM_WARPS, "enable_fp_fusion": False},
    )


@pytest.mark.parametrize("options", CAST)
def test_compiled_for_hopper(options, monkeypatch, tmp_path):
    """Roundings are the reference's; no fp8 conversion is of the kind that ptxas miscompiles (see tiles.encode)."""
    compiled = compile_cast(monkeypatch, tmp_path, options, "*bf16")
    ptx = compiled.asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert set(re.findall(r"div\.\S*f32", ptx)) == {"div.rn.f32"}
    assert not re.findall(r"\.ftz|cvt\.rz|fma\.", ptx)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    listing = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-sass", binary],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    last_operands = re.findall(r"F2FP\.SATFINITE\.\S+MERGE_C [^;]*, (\w+)[^,;]*;", listing)
    assert set(last_operands) == {"RZ"}


def main(check):
    import torch

    from fullgraph import kernels, reference
    from fullgraph.formats import BOTH, FourOverSix, Orientation
    from fullgraph.kernels import nvfp4
    from oracles import assert_same_bits

    nvfp4._encode_scales, nvfp4._decode_scales = encode_scales, decode_scales
    torch.manual_seed(0)
    all_options = [
        {},
        {"two_dimensional": True},
        {"hadamard": True},
        {"four_over_six": FourOverSix.MAE},
        {"four_over_six": FourOverSix.MSE, "two_dimensional": True},
        {"row_scaled": True},
        {"seed": torch.tensor(1 << 40), "hadamard": True, "row_scaled": True},
        {"seed": torch.tensor(-7), "two_dimensional": True},
    ]

    most = [all_options[i] for i in (2, 4, 6)]  # every path through the kernel

    def assert_same_cast(x, **options):
        expected = reference.cast_nvfp4(x, **options)
        actual = kernels.cast_nvfp4(x, **options)
        for ours, theirs in zip(actual, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert_same_bits(ours, theirs)

    def check_shapes():
        for options in all_options:
            assert_same_cast(torch.randn(33, 50), orientation=BOTH, **options)
        for shape in SHAPES:
            for options in most:
                assert_same_cast(torch.randn(shape), orientation=BOTH, **options)

    def check_layouts():
        for orientation in Orientation:
            for options in most:
                assert_same_cast(torch.randn(33, 50), orientation=orientation, pad=16, **options)
        for options in most:
            assert_same_cast(torch.randn(33, 50), orientation=BOTH, swizzled=True, **options)
        assert_same_cast(torch.randn(130, 70), orientation=BOTH, pad=32, swizzled=True)
        x = torch.randn(33, 50)
        for view in (x.t(), x[::2, 3:], x[:1].expand(20, 50), x[:, :1].expand(33, 20).half()):
            assert_same_cast(view, orientation=BOTH)

    def check_values():
        scales = torch.logspace(0, -6, 18)[:, None]
        outlier, infinite, nan = (torch.randn(18, 35) for _ in range(3))
        outlier[2, 20], infinite[2, 20], nan[2, 20] = 3e4, -INF, NAN
        for x in (
            torch.zeros(3, 17),
            -torch.zeros(3, 17),
            torch.randn(18, 35) * scales,
            torch.randn(18, 35) * torch.finfo(torch.float32).tiny / 4,
            torch.randn(18, 35).sign() * torch.finfo(torch.float32).max,
            torch.arange(-36, 36).view(9, 8) / 4.0,
            outlier,
            infinite,
            nan,
            torch.randn(18, 35).half(),
            torch.randn(18, 35).bfloat16(),
        ):
            for options in most:
                assert_same_cast(x, orientation=BOTH, **options)

    def check_broken():
        x = torch.randn(33, 50)
        expected = reference.cast_nvfp4(x)[0]
        x[5, 7] = -x[5, 7]
        assert_same_bits(kernels.cast_nvfp4(x)[0], expected)

    {
        "shapes": check_shapes,
        "layouts": check_layouts,
        "values": check_values,
        "broken": check_broken,
    }[check]()
    print(f"{check} ok")


if __name__ == "__main__":
    main(sys.argv[1])
