"""The MXFP8 kernel as machine code for Hopper, which needs a compiler but no GPU.

What the generated instructions must and must not be, for the results to be those of the reference.
The results themselves are compared in tests/gpu/test_kernels_mx.py.
"""

import re
import struct
import subprocess

import pytest

from fullgraph.formats import BOTH, Format, MXScaleMode, Orientation

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fullgraph.kernels import mx  # noqa: E402

# 16-bit and 32-bit inputs are transposed by different routes.
INPUTS = ["*bf16", "*fp16", "*fp32"]
FORMATS = [Format.E4M3, Format.E5M2]
ALIGNED = [["tt.divisibility", 16]]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_cast(
    input_type="*bf16",
    format=Format.E4M3,
    scale_mode=MXScaleMode.RCEIL,
    *,
    square=False,
    swizzled=False,
    orientation=BOTH,
    **constants,
):
    kernel = mx._cast_kernel
    names = kernel.arg_names
    tile_rows, tile_columns = mx._TILE
    constants |= {
        "stride_column": 1,
        **mx._constants(format, scale_mode),
        "SQUARE": square,
        "SWIZZLED": swizzled,
        "TILE_M": tile_rows,
        "TILE_K": tile_columns,
    }
    if not orientation.rowwise:
        constants |= dict.fromkeys(["data_ptr", "scale_inv_ptr"])
    if not orientation.columnwise:
        constants |= dict.fromkeys(["columnwise_data_ptr", "columnwise_scale_inv_ptr"])
    types = {name: "*u8" if name.endswith("_ptr") else "i32" for name in names}
    types["x_ptr"] = input_type
    source = ASTSource(
        kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs=constants,
        attrs={(i,): ALIGNED for i, name in enumerate(names) if name not in constants},
    )
    options = {"num_warps": mx._NUM_WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def assembly(compiled, tmp_path, *options):
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, *options, binary]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def conversions(compiled, tmp_path):
    """How many fp8 conversions put their two bytes beside two others, and how many do not."""
    listing = assembly(compiled, tmp_path, "-sass")
    last_operands = re.findall(r"F2FP\.SATFINITE\.\S+MERGE_C [^;]*, (\w+)[^,;]*;", listing)
    alone = last_operands.count("RZ")
    return len(last_operands) - alone, alone


@pytest.mark.parametrize("input_type", INPUTS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("square", [False, True], ids=["1-D", "2-D"])
def test_cast(input_type, format, square, tmp_path):
    compiled = compile_cast(input_type, format, square=square, swizzled=square)
    ptx = compiled.asm["ptx"]
    assert f"cvt.rn.satfinite.{format.name.lower()}x2.f32" in ptx
    # Subnormals count: a block may be as small as float32 gets.
    assert not re.findall(r"\.ftz|cvt\.rz|m(?:in|ax)\.NaN|fma\.\S*f32|div\.\S*f32", ptx)
    reciprocal = struct.unpack("<I", struct.pack("<f", 1 / format.max))[0]
    assert f"0f{reciprocal:08X}" in ptx
    assert ptx.count("st.global.v4") >= 4, "both copies in wide stores"
    # The miscompile that fullgraph.kernels.tiles.encode tells of begins with merged conversions.
    assert conversions(compiled, tmp_path) == (0, 32)
    usage = assembly(compiled, tmp_path, "--dump-resource-usage")
    assert re.findall(r"STACK:(\d+)", usage) == ["0"], "no spilled registers"


@pytest.mark.parametrize("orientation", [Orientation.ROWWISE, Orientation.COLUMNWISE])
def test_one_copy_is_one_cast(orientation, tmp_path):
    compiled = compile_cast(orientation=orientation)
    assert conversions(compiled, tmp_path) == (0, 16)
    assert compiled.asm["ptx"].count("st.global.v4") == 2


@pytest.mark.parametrize("scale_mode", MXScaleMode)
def test_scale_is_integer_arithmetic(scale_mode):
    ptx = compile_cast(scale_mode=scale_mode, orientation=Orientation.ROWWISE).asm["ptx"]
    assert not re.findall(r"lg2|ex2|ue8m0", ptx)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("square", [False, True])
def test_sizes_of_one_compile(swizzled, square):
    """Triton makes a constant of an argument that is 1."""
    sizes = ["rows", "columns", "padded_rows", "padded_columns", "stride_row"]
    compile_cast(swizzled=swizzled, square=square, **dict.fromkeys(sizes, 1))
