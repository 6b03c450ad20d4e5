"""The kernels of scales per row and per block as machine code for Hopper, which needs a compiler but no GPU.

What the generated instructions must and must not be, for the results to be those of the reference. The results
themselves are compared in tests/gpu/test_kernels_block.py.
"""

import re
import subprocess

import pytest

from fullgraph.formats import BOTH, COLUMNWISE, ROWWISE, Format, largest_finite

triton = pytest.importorskip("triton", reason="Triton is not installed")

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fullgraph.kernels import block, per_row  # noqa: E402
from fullgraph.kernels.tiles import FP8  # noqa: E402

# 16-bit and 32-bit inputs are transposed by different routes.
INPUTS = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
ALIGNED = [["tt.divisibility", 16]]
SIZES = ["rows", "columns", "padded_rows", "padded_columns", "stride_row"]
TILE_OF_ROWS = dict(zip(["TILE_M", "TILE_K"], per_row._TILE, strict=True))
CASTS = {
    "per row": (per_row._cast_kernel, TILE_OF_ROWS),
    "1x128": (block._cast_kernel, {"TWO_DIMENSIONAL": False, "TILE": block._BLOCK}),
    "128x128": (block._cast_kernel, {"TWO_DIMENSIONAL": True, "TILE": block._BLOCK}),
}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_for_hopper(kernel, input_type, constants):
    names = kernel.arg_names
    types = dict.fromkeys(names, "i32") | {n: "*fp32" for n in names if n.endswith("inv_ptr")}
    types |= {n: "*u8" for n in names if n.endswith("data_ptr")}
    types |= {n: "*i32" for n in names if n.endswith("bits_ptr")}
    types["x_ptr"] = input_type
    source = ASTSource(
        kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs=constants,
        attrs={(i,): ALIGNED for i, name in enumerate(names) if name not in constants},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})


def compile_cast(cast, input_type="*bf16", format=Format.E4M3, *, orientation=BOTH, **constants):
    kernel, tile = CASTS[cast]
    constants |= {
        "stride_column": 1,
        "EPS": 0.0,
        "LARGEST": largest_finite(INPUTS[input_type]),
        "POWER_OF_TWO": False,
        "FORMAT_MAX": format.max,
        "NAN_CODE": format.nan_code,
        "FP8": FP8[format.name],
        **tile,
    }
    if not orientation.rowwise:
        constants |= dict.fromkeys(["row_bits_ptr", "data_ptr", "scale_inv_ptr"])
    if not orientation.columnwise:
        absent = ["column_bits_ptr", "columnwise_data_ptr", "columnwise_scale_inv_ptr"]
        constants |= dict.fromkeys(absent)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return compile_for_hopper(kernel, input_type, constants)


def assembly(compiled, tmp_path, option):
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, option, binary]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def conversions(compiled, tmp_path):
    """How many fp8 conversions put their two bytes beside two others, and how many do not."""
    listing = assembly(compiled, tmp_path, "-sass")
    last_operands = re.findall(r"F2FP\.SATFINITE\.\S+MERGE_C [^;]*, (\w+)[^,;]*;", listing)
    alone = last_operands.count("RZ")
    return len(last_operands) - alone, alone


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("input_type", INPUTS)
@pytest.mark.parametrize("format", [Format.E4M3, Format.E5M2], ids=lambda f: f.name)
def test_cast(cast, input_type, format, tmp_path):
    compiled = compile_cast(cast, input_type, format)
    ptx = compiled.asm["ptx"]
    assert f"cvt.rn.satfinite.{format.name.lower()}x2.f32" in ptx
    assert set(re.findall(r"div\.\S*f32", ptx)) == {"div.rn.f32"}
    assert not re.findall(r"\.ftz|cvt\.rz|fma\.\S*f32|m(?:in|ax)\.NaN", ptx)
    elements_of_a_thread = CASTS[cast][1].get("TILE_M", 128) * 128 // 256
    assert ptx.count("st.global.v4") == 2 * elements_of_a_thread // 16, "both copies in wide stores"
    # The miscompile that fullgraph.kernels.tiles.encode tells of begins with merged conversions. One cast makes both
    # copies only where they have the same scales.
    num_casts = 1 if cast == "128x128" else 2
    assert conversions(compiled, tmp_path) == (0, num_casts * elements_of_a_thread // 2)
    usage = assembly(compiled, tmp_path, "--dump-resource-usage")
    assert re.findall(r"STACK:(\d+)", usage) == ["0"], "no spilled registers"


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("orientation", [ROWWISE, COLUMNWISE])
def test_one_copy_is_one_cast(cast, orientation, tmp_path):
    compiled = compile_cast(cast, orientation=orientation)
    elements_of_a_thread = CASTS[cast][1].get("TILE_M", 128) * 128 // 256
    assert conversions(compiled, tmp_path) == (0, elements_of_a_thread // 2)
    assert compiled.asm["ptx"].count("st.global.v4") == elements_of_a_thread // 16


@pytest.mark.parametrize("cast", CASTS)
def test_sizes_of_one_compile(cast):
    """Triton makes a constant of an argument that is 1."""
    compile_cast(cast, **dict.fromkeys(SIZES, 1))


def test_amax_of_rows_and_columns():
    constants = {"stride_column": 1, **TILE_OF_ROWS}
    ptx = compile_for_hopper(per_row._amax_kernel, "*bf16", constants).asm["ptx"]
    assert ptx.count("atom.global.gpu.relaxed.max.s32") == 2
    assert "ld.global.v4" in ptx
    assert ".ftz" not in ptx
