"""The padding that native GEMMs ask for, on the CPU: it must change no value."""

import pytest
import torch

import fullgraph as fg
from fullgraph import gemm

SHAPES = [(0, 16, 16), (1, 1, 1), (13, 48, 7), (2, 3, 33, 17, 5), (24, 712, 31), (5, 767)]


# Plans are kept for good, by token: another epsilon, too small to matter, asks for new ones.
UNPADDED = fg.recipes.Float8CurrentScaling(amax_epsilon=1e-30)
PADDED = fg.recipes.Float8CurrentScaling(amax_epsilon=2e-30)


def results(recipe, shape, quantized_input, quantized_weight):
    torch.manual_seed(0)
    *leading, k, n = shape
    layer = fg.Linear(k, n, dtype=torch.bfloat16, recipe=recipe, quantized_weight=quantized_weight)
    x = torch.randn(*leading, k, dtype=torch.bfloat16, requires_grad=True)
    quantizer = fg.PerTensorQuantizer(fg.Format.E4M3)
    output = layer(fg.quantize(x, quantizer) if quantized_input else x)
    output.backward(torch.randn_like(output))
    return output.detach(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("quantized_weight", [False, True])
@pytest.mark.parametrize("quantized_input", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padded_operands_give_the_same_values(
    monkeypatch, shape, quantized_input, quantized_weight
):
    expected = results(UNPADDED, shape, quantized_input, quantized_weight)
    contractions = []

    def padded(backend, a, b, **options):
        contractions.append(a.data.shape[1])
        assert a.data.shape[1] == b.data.shape[1]
        return gemm_(backend, a, b, **options)

    gemm_ = gemm.gemm
    monkeypatch.setattr(gemm, "alignment", lambda device: 16)
    monkeypatch.setattr(gemm, "gemm", padded)
    actual = results(PADDED, shape, quantized_input, quantized_weight)
    for ours, want in zip(actual, expected, strict=True):
        assert torch.equal(ours, want)  # by value: a sum over more zeros may turn -0 into 0
    assert len(contractions) == 3
    assert all(size % 16 == 0 for size in contractions)
