"""The Triton kernels under Triton's interpreter: indices, masks, padding and the scale.

The interpreter must be chosen before Triton is imported, so this file runs itself in a second
process. Its fp8 casts are not those of a GPU, so the data are numbers whose cast is exact.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
NAN, INF = float("nan"), float("inf")

# One element, ragged and whole tiles (64 x 128), more than one tile each way, nothing at all.
SHAPES = [(1, 1), (7, 33), (64, 128), (65, 129), (130, 260), (1, 300), (300, 1), (0, 5), (3, 0)]
AMAXES = [0.0, 1e-39, 1.4e-45, 3.3, 448.0, 3.4e38, INF, NAN]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


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


def test_importing_kernels_imports_no_triton():
    code = "import sys, fullgraph.kernels, fullgraph.gemm; print('triton' in sys.modules)"
    result = run("-c", code)
    assert (result.stdout, result.stderr) == ("False\n", "")


def test_unknown_kernel():
    from fullgraph import kernels

    with pytest.raises(AttributeError, match="has no attribute 'cast_per_moon'"):
        kernels.cast_per_moon  # noqa: B018


@needs_triton
@pytest.mark.parametrize("check", ["amax", "layout", "scale", "special"])
def test_interpreted(check):
    result = run(__file__, check, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{check} ok\n"


@needs_triton
def test_a_difference_is_noticed():
    result = run(__file__, "broken", TRITON_INTERPRET="1")
    assert "differ, first at" in result.stderr


def main(check):
    import torch

    from fullgraph import kernels, reference
    from fullgraph.formats import BOTH, Format, Orientation
    from oracles import assert_same_bits

    def exact_values(shape):
        return torch.randint(-7, 8, shape).float()

    def views(x):
        """The same matrix with other strides."""
        yield x
        yield x.t().contiguous().t()
        yield torch.stack([x, -x], 2)[:, :, 0]
        yield x.new_zeros(x.shape[0] + 1, x.shape[1] + 3)[1:, 3:].copy_(x)

    def assert_same_cast(x, amax, format, **options):
        expected = reference.cast_per_tensor(x, amax, format, **options)
        actual = kernels.cast_per_tensor(x, amax, format, **options)
        for ours, theirs in zip(actual, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert_same_bits(ours, theirs)

    def check_amax():
        for shape in [*SHAPES, (9000,), (2, 3, 5), ()]:
            x = torch.randn(shape)
            assert_same_bits(kernels.amax(x), reference.amax(x))
        for x in views(torch.randn(70, 150).bfloat16()):
            assert_same_bits(kernels.amax(x), reference.amax(x))
        x = torch.randn(3, 4).expand(5, 3, 4)
        assert_same_bits(kernels.amax(x), reference.amax(x))
        for special in (NAN, -NAN, INF, -INF, 1e-45):
            for dtype in (torch.float32, torch.float16, torch.float64):
                x = torch.zeros(3, 200, dtype=dtype)
                x[1, 170] = special
                assert_same_bits(kernels.amax(x), reference.amax(x))

    def check_layout():
        one = torch.tensor(448.0)  # scale 1
        for shape in SHAPES:
            for orientation in Orientation:
                for pad in (1, 16):
                    x = exact_values(shape)
                    assert_same_cast(x, one, Format.E4M3, orientation=orientation, pad=pad)
        for x in views(exact_values((70, 150)).half()):
            assert_same_cast(x, one, Format.E4M3, orientation=BOTH, pad=16)
        assert_same_cast(torch.ones(1, 40).expand(70, 40), one, Format.E4M3, orientation=BOTH)

    def check_scale():
        x = torch.zeros(2, 2)
        for format in (Format.E4M3, Format.E5M2):
            for options in ({}, {"power_of_two": True}, {"eps": 1e-12}, {"eps": 1e-45}):
                for amax in AMAXES:
                    for dtype in (torch.float32, torch.bfloat16, torch.float16):
                        assert_same_cast(x.to(dtype), torch.tensor(amax), format, **options)

    def check_special():
        x = torch.tensor([[NAN, -NAN, INF, -INF, -0.0, 0.0, 1e30, -1e30, 2.0]])
        for format in (Format.E4M3, Format.E5M2):
            for amax in (INF, NAN, 0.0, format.max):
                for dtype in (torch.float32, torch.float16):
                    assert_same_cast(x.to(dtype), torch.tensor(amax), format, orientation=BOTH)
                # The interpreter keeps bfloat16 as integers and finds none of them to be NaN.
                numbers = x[:, 2:].bfloat16()
                assert_same_cast(numbers, torch.tensor(amax), format, orientation=BOTH)

    def check_broken():
        x = exact_values((7, 33))
        assert_same_bits(kernels.amax(x / 2), reference.amax(x))

    {
        "amax": check_amax,
        "layout": check_layout,
        "scale": check_scale,
        "special": check_special,
        "broken": check_broken,
    }[check]()
    print(f"{check} ok")


if __name__ == "__main__":
    main(sys.argv[1])
