"""The Triton kernel of delayed scaling: under Triton's interpreter, and as machine code for Hopper.

The first in a second process, as in test_kernels_interpreted.py; the second as in test_kernels_compiled.py.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
NAN, INF = float("nan"), float("inf")

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
@pytest.mark.parametrize("check", ["layout", "amax", "special"])
def test_interpreted(check):
    result = interpret(check)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{check} ok\n"


@needs_triton
def test_a_difference_is_noticed():
    assert "differ, first at" in interpret("broken").stderr


def interpret(check):
    path = os.pathsep.join([str(SOURCES), *sys.path])
    return subprocess.run(
        [sys.executable, "-W", "ignore", __file__, check],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def main(check):
    import torch

    from fullgraph import kernels, reference
    from fullgraph.formats import BOTH, Format, Orientation
    from oracles import assert_same_bits

    # One element, ragged and whole tiles (64 x 128), more than one tile each way, nothing at all.
    shapes = [(1, 1), (7, 33), (64, 128), (65, 129), (130, 260), (0, 5), (3, 0)]

    def exact_values(shape):
        """Numbers whose cast is exact, which the interpreter's casts are only then."""
        return torch.randint(-7, 8, shape).float()

    def assert_same_cast(x, factor, before, format, **options):
        results = []
        for backend in (kernels, reference):
            state, scales = torch.full((3,), 0.5), torch.full((3,), factor)
            if before is not None:
                state[1] = before
            amax = None if before is None else state[1]
            results.append(
                [*backend.cast_delayed(x, scales[1], amax, format, **options), state, scales]
            )
        for ours, theirs in zip(*results, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert_same_bits(ours, theirs)

    def check_layout():
        for shape in shapes:
            for orientation in Orientation:
                for pad in (1, 16):
                    options = {"orientation": orientation, "pad": pad}
                    assert_same_cast(exact_values(shape), 2.0, 1.0, Format.E4M3, **options)
                    assert_same_cast(exact_values(shape), 0.5, None, Format.E5M2, **options)
        x = exact_values((70, 150)).half()
        for view in (x.t(), x[::2, 3:], x[:1].expand(70, 150)):
            assert_same_cast(view, 2.0, 0.0, Format.E4M3, orientation=BOTH, pad=16)

    def check_amax():
        for shape in shapes:
            for before in (0.0, 2.5, 1e30, INF):
                # In every place, the last tiles among them.
                x = torch.zeros(shape)
                if x.numel():
                    x.view(-1)[torch.randint(x.numel(), ())] = -3.0
                assert_same_cast(x, 1.0, before, Format.E4M3)

    def check_special():
        x = torch.tensor([[NAN, -NAN, INF, -INF, -0.0, 0.0, 1e30, -1e30, 2.0]])
        for format in (Format.E4M3, Format.E5M2):
            for factor in (1.0, 4.0, 0.25):
                for columns in (slice(0, 9), slice(0, 2), slice(4, 6), slice(6, 9), slice(3, 9)):
                    for dtype in (torch.float32, torch.float16):
                        part = x[:, columns].to(dtype)
                        assert_same_cast(part, factor, 0.0, format, orientation=BOTH)

    def check_broken():
        x = exact_values((7, 33))
        x[3, 3] = 100.0
        amaxes = torch.zeros(2)
        kernels.cast_delayed(x, torch.tensor(1.0), amaxes[0], Format.E4M3)
        reference.cast_delayed(x / 2, torch.tensor(1.0), amaxes[1], Format.E4M3)
        assert_same_bits(amaxes[:1], amaxes[1:])

    {
        "layout": check_layout,
        "amax": check_amax,
        "special": check_special,
        "broken": check_broken,
    }[check]()
    print(f"{check} ok")


INPUTS = ["*bf16", "*fp16", "*fp32"]


@needs_triton
@pytest.mark.parametrize("input_type", INPUTS)
@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
def test_compiled_for_hopper(input_type, name, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fullgraph.formats import Format
    from fullgraph.kernels import per_tensor
    from fullgraph.kernels.tiles import FP8

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, format = per_tensor._cast_delayed_kernel, Format[name]
    names = kernel.arg_names
    tile_rows, tile_columns = per_tensor._TILE
    types = dict.fromkeys(names, "i32") | {
        "x_ptr": input_type,
        "scale_ptr": "*fp32",
        "bits_ptr": "*i32",
        "scale_inv_ptr": "*fp32",
        "rowwise_ptr": "*u8",
        "columnwise_ptr": "*u8",
    }
    constants = {
        "stride_column": 1,
        "FORMAT_MAX": format.max,
        "NAN_CODE": format.nan_code,
        "FP8": FP8[name],
        "TILE_M": tile_rows,
        "TILE_K": tile_columns,
    }
    unaligned = ("scale_ptr", "bits_ptr")  # slots of a state
    aligned = [n for n in names if n not in constants and n not in unaligned]
    compiled = triton.compile(
        ASTSource(
            kernel,
            signature={n: "constexpr" if n in constants else types[n] for n in names},
            constexprs=constants,
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
        ),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 8},
    )
    ptx = compiled.asm["ptx"]
    assert f"cvt.rn.satfinite.{name.lower()}x2.f32" in ptx
    assert re.findall(r"div\.\S*f32", ptx) == ["div.rn.f32"]
    assert not re.findall(r"\.ftz|cvt\.rz|m(?:in|ax)\.NaN", ptx)
    assert ptx.count("st.global.v4") >= 4, "both copies in wide stores"
    assert "ld.global.v4" in ptx
    assert ptx.count("atom.global.gpu.relaxed.max.s32") == 1, "one for each program"
    merged, alone = merged_conversions(compiled, tmp_path)
    assert merged == 0
    assert alone >= 16


def merged_conversions(compiled, tmp_path):
    """How many fp8 conversions put their two bytes beside two others, and how many do not."""
    import triton

    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    disassembler = triton.knobs.nvidia.cuobjdump.path
    listing = subprocess.run(
        [disassembler, "-sass", binary], capture_output=True, text=True, check=True
    ).stdout
    last_operands = re.findall(r"F2FP\.SATFINITE\.\S+MERGE_C [^;]*, (\w+)[^,;]*;", listing)
    alone = last_operands.count("RZ")
    return len(last_operands) - alone, alone


if __name__ == "__main__":
    main(sys.argv[1])
