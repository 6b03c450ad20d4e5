"""The Triton kernels as machine code for Hopper, which needs a compiler but no GPU.

What the generated instructions must and must not be, for the results to be those of the reference.
The results themselves are compared in tests/gpu/test_kernels.py.
"""

import re
import subprocess

import pytest

from fullgraph.formats import Format, largest_finite

triton = pytest.importorskip("triton", reason="Triton is not installed")

import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fullgraph.kernels import per_tensor  # noqa: E402
from fullgraph.kernels.tiles import FP8  # noqa: E402

# 16-bit and 32-bit inputs are transposed by different routes.
INPUTS = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
FORMATS = [Format.E4M3, Format.E5M2]
ALIGNED = [["tt.divisibility", 16]]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_for_hopper(kernel, types, constants):
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs=constants,
        attrs={(i,): ALIGNED for i, name in enumerate(names) if name not in constants},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})


def compile_cast(input_type, format):
    types = dict.fromkeys(per_tensor._cast_kernel.arg_names, "i32")
    types |= {"x_ptr": input_type, "amax_ptr": "*fp32", "scale_inv_ptr": "*fp32"}
    types |= {"rowwise_ptr": "*u8", "columnwise_ptr": "*u8"}
    tile_rows, tile_columns = per_tensor._TILE
    constants = {
        "stride_column": 1,
        "EPS": 0.0,
        "LARGEST": largest_finite(INPUTS[input_type]),
        "POWER_OF_TWO": False,
        "FORMAT_MAX": format.max,
        "NAN_CODE": format.nan_code,
        "FP8": FP8[format.name],
        "TILE_M": tile_rows,
        "TILE_K": tile_columns,
    }
    return compile_for_hopper(per_tensor._cast_kernel, types, constants)


def merged_conversions(compiled, tmp_path):
    """How many fp8 conversions put their two bytes beside two others, and how many do not."""
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    disassembler = triton.knobs.nvidia.cuobjdump.path
    listing = subprocess.run(
        [disassembler, "-sass", binary], capture_output=True, text=True, check=True
    ).stdout
    last_operands = re.findall(r"F2FP\.SATFINITE\.\S+MERGE_C [^;]*, (\w+)[^,;]*;", listing)
    alone = last_operands.count("RZ")
    return len(last_operands) - alone, alone


@pytest.mark.parametrize("input_type", INPUTS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_cast(input_type, format, tmp_path):
    compiled = compile_cast(input_type, format)
    ptx = compiled.asm["ptx"]
    assert f"cvt.rn.satfinite.{format.name.lower()}x2.f32" in ptx
    assert re.findall(r"div\.\S*f32", ptx) == ["div.rn.f32"] * 2
    assert not re.findall(r"\.ftz|cvt\.rz|m(?:in|ax)\.NaN", ptx)
    assert ptx.count("st.global.v4") >= 4, "both copies in wide stores"
    merged, alone = merged_conversions(compiled, tmp_path)
    assert merged == 0
    assert alone >= 16


def test_amax():
    kernel = per_tensor._amax_kernel
    types = dict.fromkeys(kernel.arg_names, "i32") | {"x_ptr": "*bf16", "bits_ptr": "*i32"}
    rows, columns = per_tensor._FLAT_TILE
    constants = {"rows": 1, "stride_column": 1, "NUM_TILES": 4, "TILE_M": rows, "TILE_K": columns}
    ptx = compile_for_hopper(kernel, types, constants).asm["ptx"]
    assert "atom.global.gpu.relaxed.max.s32" in ptx
    assert "ld.global.v4" in ptx
    assert ".ftz" not in ptx


@triton.jit
def _bare_cast(x_ptr, out_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out_ptr + index, tl.load(x_ptr + index).to(tl.float8e4nv).to(tl.uint8, bitcast=True))


def test_merged_conversions_are_found(tmp_path):
    compiled = compile_for_hopper(_bare_cast, {"x_ptr": "*fp32", "out_ptr": "*u8"}, {"N": 4096})
    merged, _ = merged_conversions(compiled, tmp_path)
    assert merged > 0
