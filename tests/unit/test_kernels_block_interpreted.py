"""The kernels of scales per row and per block under Triton's interpreter: indices, masks, padding and the scales.

The interpreter must be chosen before Triton is imported, so this file runs itself in a second process. Its fp8 casts
are not those of a GPU, so where bytes are compared the data are numbers whose cast is exact.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
NAN, INF = float("nan"), float("inf")

# One element, ragged and whole squares, more than one each way, more than four, nothing at all.
SHAPES = [(1, 1), (7, 33), (128, 128), (130, 260), (1, 600), (600, 1), (0, 5), (3, 0), (0, 0)]
AMAXES = [0.0, 1e-39, 1.4e-45, 3.3, 448.0, 3.4e38, INF, NAN]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run(cast):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES), *sys.path]),
        "TRITON_INTERPRET": "1",
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", __file__, cast],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@needs_triton
@pytest.mark.parametrize("cast", ["per_row", "stretches", "squares"])
def test_interpreted(cast):
    result = run(cast)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{cast} ok\n"


@needs_triton
def test_a_difference_is_noticed():
    result = run("broken")
    assert "differ, first at" in result.stderr


def main(cast):
    import torch

    from fullgraph import kernels, reference
    from fullgraph.formats import BOTH, Format, Orientation
    from oracles import assert_same_bits

    torch.manual_seed(0)

    def exact_values(shape):
        """Numbers of three bits, of another magnitude in each row and column: exact after a scale of a power of two."""
        rows, columns = shape
        magnitudes = torch.randint(-2, 3, (rows, 1)) + torch.randint(-1, 2, (1, columns))
        return torch.randint(-7, 8, shape) * 2.0**magnitudes

    def views(x):
        """The same matrix with other strides."""
        yield x
        yield x.t().contiguous().t()
        yield torch.stack([x, -x], 2)[:, :, 0]
        yield x.new_zeros(x.shape[0] + 1, x.shape[1] + 3)[1:, 3:].copy_(x)

    def assert_same_cast(name, x, format, **options):
        expected = getattr(reference, name)(x, format, **options)
        actual = getattr(kernels, name)(x, format, **options)
        for ours, theirs in zip(actual, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert_same_bits(ours, theirs)
                assert ours.stride() == torch.empty(ours.shape).stride()

    def check_layout(name, **options):
        options["power_of_two"] = True
        for shape in SHAPES:
            for orientation in Orientation:
                for pad in (1, 512) if orientation is BOTH else (16,):
                    x = exact_values(shape)
                    assert_same_cast(
                        name, x, Format.E4M3, orientation=orientation, pad=pad, **options
                    )
        for x in views(exact_values((70, 150)).half()):
            assert_same_cast(name, x, Format.E4M3, orientation=BOTH, pad=16, **options)
        expanded = exact_values((1, 140)).expand(70, 140)
        assert_same_cast(name, expanded, Format.E4M3, orientation=BOTH, **options)

    def check_scales(name, **options):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.zeros(2, 128 * len(AMAXES), dtype=dtype)
            x[1, 5::128] = torch.tensor(AMAXES)
            if dtype is torch.bfloat16:
                # The interpreter keeps bfloat16 as integers and finds none of them to be NaN.
                x.nan_to_num_(0.0, INF)
            for format in (Format.E4M3, Format.E5M2):
                for power_of_two, eps in ((False, 0.0), (True, 1e-12), (False, 1e-45)):
                    options |= {"power_of_two": power_of_two, "eps": eps, "orientation": BOTH}
                    expected = getattr(reference, name)(x, format, **options)
                    actual = getattr(kernels, name)(x, format, **options)
                    assert_same_bits(actual[2], expected[2])
                    assert_same_bits(actual[3], expected[3])

    def check_all(name, **options):
        check_layout(name, **options)
        check_scales(name, **options)

    def check_broken():
        x = exact_values((7, 33))
        actual = kernels.cast_block(x, Format.E4M3)
        assert_same_bits(actual[2], reference.cast_block(2 * x, Format.E4M3)[2])

    {
        "per_row": lambda check: check("cast_per_row"),
        "stretches": lambda check: check("cast_block"),
        "squares": lambda check: check("cast_block", two_dimensional=True),
        "broken": lambda _: check_broken(),
    }[cast](check_all)
    print(f"{cast} ok")


if __name__ == "__main__":
    main(sys.argv[1])
