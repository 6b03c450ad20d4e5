"""Structured tensors outside of ops: as tensors, parameters, checkpoints, and under optimizers."""

import copy
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import customop_ops as ops
from customop_ops import Int8Parts, Int8Tensor, int8, same, to_int8
from fullgraph.customop import StructuredTensor
from fullgraph.errors import ConfigError


@dataclass
class SplitParts:
    """A value as its bf16 rounding and what that lost; the rest may be absent. Cannot be written in place."""

    high: Tensor
    low: Tensor | None = None
    dtype: torch.dtype = torch.float32
    note: str = "none"

    @property
    def shape(self):
        return self.high.shape

    def decode(self):
        high = self.high.to(self.dtype)
        return high if self.low is None else high + self.low.to(self.dtype)


class SplitTensor(StructuredTensor, parts=SplitParts):
    pass


torch.serialization.add_safe_globals([SplitTensor])


def split(x, *, low=True, note="none"):
    high = x.to(torch.bfloat16)
    return SplitTensor(
        SplitParts(high, (x - high.to(x.dtype)).to(torch.bfloat16) if low else None, x.dtype, note)
    )


def parameter(*shape):
    return nn.Parameter(int8(torch.randn(*shape)))


# As a tensor.


def test_it_is_a_tensor_with_the_logical_shape():
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    q = int8(x)
    assert isinstance(q, Tensor)
    assert (q.shape, q.dtype, q.device, q.requires_grad) == (x.shape, x.dtype, x.device, False)
    assert isinstance(q.parts, Int8Parts)
    assert q.part_data is q.parts.data
    assert repr(q) == "Int8Tensor((3, 4), dtype=torch.bfloat16)"
    assert q.is_contiguous()


def test_decode_is_differentiable():
    q = int8(torch.randn(3, 4), requires_grad=True)
    grad = torch.randn(3, 4)
    y = q.decode()
    assert type(y) is Tensor
    assert torch.equal(y, to_int8(y).decode())
    y.backward(grad)
    assert torch.equal(q.grad, grad)
    assert type(q.grad) is Tensor


def test_unknown_ops_decode_first_and_are_differentiable():
    q = int8(torch.randn(3, 4), requires_grad=True)
    weight = torch.randn(5, 4)
    y = nn.functional.linear(q, weight)
    assert torch.equal(y, q.detach().decode() @ weight.t())
    y.sum().backward()
    assert torch.allclose(q.grad, weight.sum(0).expand(3, 4))
    assert torch.equal(torch.stack([q, q]), torch.stack([q.parts.decode()] * 2))


@pytest.mark.parametrize(
    "function",
    [Tensor.detach, Tensor.clone, lambda q: q.data, lambda q: q.to("cpu", copy=True)],
    ids=["detach", "clone", "data", "to copy"],
)
def test_these_keep_the_structure(function):
    q = int8(torch.randn(3, 4))
    assert same(function(q), q)


def test_devices_and_dtypes():
    q = int8(torch.randn(3, 4))
    assert q.to("cpu") is q
    moved = q.to("meta")
    assert isinstance(moved, Int8Tensor)
    assert moved.device.type == moved.part_scale_inv.device.type == "meta"
    assert type(q.to(torch.float64)) is Tensor
    assert torch.equal(q.to(torch.float64), q.parts.decode().double())


@pytest.mark.parametrize(
    "make", [torch.empty_like, torch.zeros_like, torch.ones_like, lambda q: q.new_zeros(2)]
)
def test_new_tensors_are_plain(make):
    q = int8(torch.randn(3, 4, dtype=torch.bfloat16))
    made = make(q)
    assert type(made) is Tensor
    assert made.dtype == torch.bfloat16


def test_writing_in_place_encodes_again():
    x = torch.randn(3, 4)
    q = int8(x)
    data, text = q.part_data, q.layout_text
    expected = int8(q.parts.decode() + 1)
    assert q.add_(1) is q
    assert same(q, expected)
    assert q.part_data is data
    assert q.layout_text == text
    q.zero_()
    assert torch.equal(q.parts.decode(), torch.zeros(3, 4))
    torch.add(x, 1, out=q)
    assert same(q, int8(x + 1))


def test_copies_between_plain_and_structured():
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    assert same(int8(x).copy_(y), int8(y))
    assert same(int8(x).copy_(int8(y)), int8(y))
    assert torch.equal(torch.empty(3, 4).copy_(int8(y)), int8(y).parts.decode())
    assert same(int8(x).copy_(split(y)), int8(split(y).parts.decode()))
    assert same(int8(x).copy_(y[:1]), int8(y[:1].expand(3, 4)))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.add_(1),
        lambda p: p.zero_(),
        lambda p: p.copy_(torch.ones(3, 4)),
        lambda p: p.copy_(int8(torch.ones(3, 4))),
    ],
    ids=["add_", "zero_", "copy_ plain", "copy_ structured"],
)
def test_autograd_notices_a_change_in_place(change):
    p = parameter(3, 4)
    y = ops.linear(
        ops.LinearForward(torch.randn(2, 4).requires_grad_(), p, numerics=ops.Numerics())
    )
    with torch.no_grad():
        change(p)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_structure_without_encode_is_read_only():
    with pytest.raises(
        ConfigError, match=r"SplitTensor cannot be changed in place(?s:.)*SplitParts has no encode_"
    ):
        split(torch.randn(3)).add_(1)


def test_components_may_be_absent():
    x = torch.randn(3, 4)
    q = split(x, low=False)
    assert q.part_low is None
    assert same(q.decode(), x.bfloat16().float())
    for other in (q.clone(), copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert other.part_low is None
        assert other.layout_text == q.layout_text != split(x).layout_text


def test_static_data_is_part_of_the_layout():
    x = torch.randn(3)
    assert split(x, note="it's").layout_text != split(x).layout_text
    assert pickle.loads(pickle.dumps(split(x, note="it's\n"))).parts.note == "it's\n"


def test_an_empty_one():
    q = int8(torch.randn(0, 4), requires_grad=True)
    q.decode().sum().backward()
    assert q.grad.shape == (0, 4)


# Definitions.


def test_parts_are_a_dataclass():
    with pytest.raises(ConfigError, match=r"Bad: parts must be a dataclass(?s:.)*@dataclass"):
        type("Bad", (StructuredTensor,), {}, parts=int)


def test_parts_have_a_tensor():
    @dataclass
    class NoTensor:
        dtype: torch.dtype

    with pytest.raises(ConfigError, match="Bad: NoTensor has no Tensor field"):
        type("Bad", (StructuredTensor,), {}, parts=NoTensor)


def test_parts_have_shape_dtype_and_decode():
    @dataclass
    class Incomplete:
        data: Tensor
        dtype: torch.dtype

        @property
        def shape(self):
            return self.data.shape

    with pytest.raises(ConfigError, match="Bad: Incomplete has no decode"):
        type("Bad", (StructuredTensor,), {}, parts=Incomplete)


def test_parts_belong_to_one_class():
    with pytest.raises(ConfigError, match="Bad: SplitParts already belongs to SplitTensor"):
        type("Bad", (StructuredTensor,), {}, parts=SplitParts)


def test_a_class_can_be_taught_ops():
    @dataclass
    class TaughtParts(SplitParts):
        pass

    class Taught(StructuredTensor, parts=TaughtParts):
        pass

    @Taught.implements(torch.ops.aten.neg.default)
    def negate(func, args, kwargs):
        return Taught(TaughtParts(-args[0].part_high))

    x = torch.ones(3)
    assert isinstance(-Taught(TaughtParts(x)), Taught)
    assert type(-split(x)) is Tensor
    assert isinstance(Taught(TaughtParts(x)).clone(), Taught)


# As a parameter.


def test_it_can_be_a_parameter():
    p = parameter(3, 4)
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, Int8Tensor)
    assert p.requires_grad
    assert p.is_leaf
    module = nn.Module()
    module.p = p
    assert dict(module.named_parameters()) == {"p": p}
    assert isinstance(module.to("meta").p, Int8Tensor)


def test_deepcopy_keeps_everything():
    module = nn.Module()
    module.a = module.b = parameter(3, 4)
    module.a.main_grad = torch.ones(3, 4)
    module.a.grad = torch.randn(3, 4)
    copied = copy.deepcopy(module)
    assert copied.a is copied.b
    assert copied.a is not module.a
    assert isinstance(copied.a, nn.Parameter)
    assert copied.a.requires_grad
    assert same(copied.a, module.a)
    assert torch.equal(copied.a.grad, module.a.grad)
    assert torch.equal(copied.a.main_grad, module.a.main_grad)
    copied.a.data.zero_()
    copied.a.main_grad.zero_()
    assert module.a.parts.decode().any()
    assert module.a.main_grad.any()


def test_deepcopy_keeps_whether_it_is_trained():
    assert copy.deepcopy(int8(torch.randn(3), requires_grad=True)).requires_grad
    assert not copy.deepcopy(nn.Parameter(int8(torch.randn(3)), requires_grad=False)).requires_grad


def test_pickle_keeps_everything():
    p = parameter(3, 4)
    p.main_grad = torch.ones(3, 4)
    loaded = pickle.loads(pickle.dumps(p))
    assert isinstance(loaded, nn.Parameter)
    assert loaded.requires_grad
    assert same(loaded, p)
    assert torch.equal(loaded.main_grad, p.main_grad)


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_weights_only_load():
    p = parameter(3, 4)
    loaded = saved_and_loaded(
        {"p": p, "q": int8(torch.ones(2)), "s": split(torch.ones(2), low=False)}
    )
    assert same(loaded["p"], p)
    assert isinstance(loaded["p"], nn.Parameter)
    assert same(loaded["q"], int8(torch.ones(2)))
    assert loaded["s"].part_low is None


def test_weights_only_load_shares_storages():
    q = int8(torch.randn(3, 4))
    loaded = saved_and_loaded({"whole": q.part_data, "q": q})
    loaded["whole"].zero_()
    assert not loaded["q"].part_data.any()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("source", "target"), [(False, True), (True, False), (True, True)])
def test_checkpoints_load_from_plain_and_structured(source, target, assign):
    given = ops.Linear(4, 3, int8_weight=source)
    taken = ops.Linear(4, 3, int8_weight=target)
    result = taken.load_state_dict(saved_and_loaded(given.state_dict()), assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert isinstance(taken.weight, Int8Tensor) is (source if assign else target)
    assert isinstance(taken.weight, nn.Parameter)
    expected = given.weight.detach()
    if not assign and source != target:
        expected = int8(expected) if target else expected.parts.decode()
    assert same(taken.weight.detach(), expected)
    assert torch.equal(taken.bias, given.bias)


# Optimizers.

OPTIMIZERS = {
    "sgd": lambda p, **options: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.01, **options
    ),
    "adamw": lambda p, **options: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01, **options),
}


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_update_the_decoded_value(optimizer, options):
    """Each step equals a step of the same optimizer on the decoded value, encoded again."""
    structured = [parameter(3, 4), parameter(4)]
    mirror = [p.detach().parts.decode().requires_grad_() for p in structured]
    steps = [OPTIMIZERS[optimizer](p, **options) for p in (structured, mirror)]
    for _ in range(3):
        for p, m in zip(structured, mirror, strict=True):
            p.grad = torch.randn(p.shape)
            m.grad = p.grad.clone()
        for step in steps:
            step.step()
        for p, m in zip(structured, mirror, strict=True):
            with torch.no_grad():
                m.copy_(to_int8(m).decode())
            assert torch.allclose(p.parts.decode(), m, atol=1e-6)
    for state in steps[0].state.values():
        assert all(type(t) is Tensor for t in state.values() if isinstance(t, Tensor))


def test_gradient_utilities():
    p = parameter(3, 4)
    p.decode().sum().backward()
    norm = nn.utils.clip_grad_norm_([p], 1.0)
    assert torch.allclose(norm, torch.tensor(12**0.5))
    assert torch.allclose(p.grad.norm(), torch.tensor(1.0))
