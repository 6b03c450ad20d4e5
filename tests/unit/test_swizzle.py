"""The tile order of scales against its written definition."""

import numpy as np
import pytest
import torch

import oracles_mx
from fullgraph.errors import ShapeError
from fullgraph.reference.swizzle import swizzle, unswizzle
from oracles import assert_same_bits

# One, ragged, one tile exactly, one more than a tile each way, several tiles, nothing.
SHAPES = [(1, 1), (5, 3), (128, 4), (129, 5), (33, 9), (260, 13), (256, 8), (0, 3), (7, 0), (0, 0)]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random_bytes(shape):
    return torch.randint(1, 256, shape, dtype=torch.uint8)


@by_shape
def test_swizzle(shape):
    scale_inv = random_bytes(shape)
    assert_same_bits(swizzle(scale_inv), oracles_mx.swizzle(scale_inv.numpy()))


def test_bytes_of_one_tile_by_hand():
    rows = swizzle(torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4))
    columns = swizzle(torch.arange(4, dtype=torch.uint8).expand(128, 4))
    # Row 0, then rows 32, 64 and 96; then row 1 and so on.
    assert rows[::4].tolist() == [32 * i + j for j in range(32) for i in range(4)]
    assert columns.tolist() == [0, 1, 2, 3] * 128


def test_order_of_tiles_by_hand():
    scale_inv = torch.arange(1, 7, dtype=torch.uint8).reshape(2, 3)
    tiles = scale_inv.repeat_interleave(128, 0).repeat_interleave(4, 1)
    assert swizzle(tiles)[::512].tolist() == [1, 2, 3, 4, 5, 6]


@by_shape
def test_there_and_back(shape):
    scale_inv = random_bytes(shape)
    back = unswizzle(swizzle(scale_inv), *shape)
    assert_same_bits(back, scale_inv)
    assert back.is_contiguous()


def test_strides_do_not_matter():
    for scale_inv in (
        random_bytes((9, 130)).t(),
        random_bytes((1, 9)).expand(130, 9),
        random_bytes((260, 18))[::2, 1::2],
    ):
        assert_same_bits(swizzle(scale_inv), oracles_mx.swizzle(scale_inv.numpy()))
        strided = torch.stack([swizzle(scale_inv), swizzle(scale_inv) + 1], 1)[:, 0]
        assert_same_bits(unswizzle(strided, *scale_inv.shape), scale_inv.contiguous())


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (1, 1)])
def test_results_share_no_storage(shape):
    scale_inv = random_bytes(shape)
    flat = swizzle(scale_inv)
    tensors = [scale_inv, flat, unswizzle(flat, *shape)]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


def test_errors():
    with pytest.raises(ShapeError, match=r"swizzle: a matrix is needed \(scale_inv: uint8\[4\]\)"):
        swizzle(torch.zeros(4, dtype=torch.uint8))
    for flat in (torch.zeros(511, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.uint8)):
        with pytest.raises(ShapeError, match="scales of 3 x 2 blocks take 512 bytes"):
            unswizzle(flat, 3, 2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    compiled = torch.compile(swizzle, fullgraph=True, backend=backend, dynamic=True)
    back = torch.compile(unswizzle, fullgraph=True, backend=backend, dynamic=True)
    for shape in ((129, 5), (260, 13)):
        scale_inv = random_bytes(shape)
        assert_same_bits(compiled(scale_inv), np.asarray(oracles_mx.swizzle(scale_inv.numpy())))
        assert_same_bits(back(swizzle(scale_inv), *shape), scale_inv)
