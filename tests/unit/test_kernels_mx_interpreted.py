"""The MXFP8 kernel under Triton's interpreter: indices, masks, padding, swizzled scales and the rule of the scale.

The interpreter must be chosen before Triton is imported, so this file runs itself in a second process. Its fp8 casts
are not those of a GPU, so where codes are compared their cast is exact.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
NAN, INF = float("nan"), float("inf")

# One element, ragged, whole tiles (64 x 128), more than a tile of swizzled scales each way, nothing at all.
SHAPES = [(1, 1), (7, 33), (64, 128), (129, 100), (20, 161), (300, 1), (0, 5), (3, 0), (0, 0)]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run(*arguments):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCES), *sys.path]),
        "TRITON_INTERPRET": "1",
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@needs_triton
@pytest.mark.parametrize("check", ["layout", "orientations", "strides", "scales", "special"])
def test_interpreted(check):
    result = run(check)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{check} ok\n"


@needs_triton
@pytest.mark.parametrize("check", ["broken codes", "broken scales"])
def test_a_difference_is_noticed(check):
    assert "differ, first at" in run(check).stderr


def main(check):
    import torch

    from fullgraph import kernels, reference
    from fullgraph.errors import ConfigError, ShapeError
    from fullgraph.formats import BOTH, Format, MXScaleMode, Orientation
    from oracles import assert_same_bits

    dtypes = torch.float32, torch.bfloat16, torch.float16

    def exact_values(rows, columns):
        """Numbers of three bits, of another magnitude in each row."""
        magnitudes = 2.0 ** torch.randint(-3, 4, (rows, 1))
        return torch.randint(-7, 8, (rows, columns)) * magnitudes

    def views(x):
        """The same matrix with other strides."""
        yield x.t().contiguous().t()
        yield torch.stack([x, -x], 2)[:, :, 0]
        yield x.new_zeros(x.shape[0] + 1, x.shape[1] + 3)[1:, 3:].copy_(x)
        yield x[:1].expand_as(x)

    def assert_same_cast(x, format=Format.E4M3, *, orientation=BOTH, codes=True, **options):
        expected = reference.cast_mx(x, format, orientation=orientation, **options)
        actual = kernels.cast_mx(x, format, orientation=orientation, **options)
        for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert (ours is None) == (theirs is None)
            if ours is not None and (codes or i >= 2):
                assert_same_bits(ours, theirs)
                assert ours.stride() == torch.empty(ours.shape).stride()

    def check_layout():
        for shape in SHAPES:
            x = exact_values(*shape)
            for two_dimensional in (False, True):
                assert_same_cast(x, two_dimensional=two_dimensional)
                assert_same_cast(x, two_dimensional=two_dimensional, swizzled=True, pad=32)
        assert_same_cast(exact_values(70, 33), pad=256)

    def check_orientations():
        x = exact_values(70, 150)
        for orientation in Orientation:
            for two_dimensional in (False, True):
                for swizzled in (False, True):
                    assert_same_cast(
                        x,
                        orientation=orientation,
                        two_dimensional=two_dimensional,
                        swizzled=swizzled,
                    )

    def check_strides():
        for dtype in dtypes:
            for x in views(exact_values(70, 150).to(dtype)):
                assert_same_cast(x, pad=32)

    def check_scales():
        points = torch.tensor(
            [
                s * 2.0**e
                for e in (*range(-148, -106, 2), 0, 127)
                for s in (1, 1.25, 1.75, 1.875, 1.9375)
            ]
        )
        ends = torch.tensor(0.0), torch.tensor(INF)
        amaxes = torch.cat([points, *(torch.nextafter(points, end) for end in ends)])
        x = -amaxes[:, None]
        for format in (Format.E4M3, Format.E5M2):
            for mode in MXScaleMode:
                assert_same_cast(
                    x, format, scale_mode=mode, orientation=Orientation.ROWWISE, codes=False
                )

    def check_special():
        x = exact_values(40, 70)
        x[0, 5], x[2, 40], x[3, 41] = NAN, -NAN, -0.0
        infinite = torch.zeros(33, 65)
        infinite[0, 40], infinite[32, 64], infinite[5, 5], infinite[5, 6] = INF, -INF, INF, NAN
        for dtype in dtypes:
            for two_dimensional in (False, True):
                for values in (x, infinite):
                    for mode in (MXScaleMode.RCEIL, MXScaleMode.EVEN):
                        assert_same_cast(
                            values.to(dtype),
                            scale_mode=mode,
                            two_dimensional=two_dimensional,
                            pad=32,
                        )
        assert_same_cast(x, Format.E5M2, swizzled=True)
        for cast in (kernels.cast_mx, reference.cast_mx):
            for x, format in ((torch.ones(3), Format.E4M3), (torch.ones(2, 2), Format.E2M1)):
                try:
                    cast(x, format)
                except (ConfigError, ShapeError) as error:
                    assert "cast_mx: " in str(error)  # noqa: PT017
                else:
                    raise AssertionError("no error")

    def check_broken(result):
        x = exact_values(7, 33)
        actual, expected = kernels.cast_mx(x * 1.5, Format.E4M3), kernels.cast_mx(x, Format.E4M3)
        assert_same_bits(actual[result], expected[result])

    {
        "layout": check_layout,
        "orientations": check_orientations,
        "strides": check_strides,
        "scales": check_scales,
        "special": check_special,
        "broken codes": lambda: check_broken(0),
        "broken scales": lambda: check_broken(2),
    }[check]()
    print(f"{check} ok")


if __name__ == "__main__":
    main(sys.argv[1])
