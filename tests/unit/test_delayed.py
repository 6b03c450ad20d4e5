"""Delayed scaling without layers: the cast, the rule, the update of many layers at once, against the second oracle."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch

import oracles
import oracles_delayed
from fullgraph import reference
from fullgraph.customop import cuda_graph_lint
from fullgraph.customop.token import encode
from fullgraph.delayed import ScalingRule, find_algorithm, register_algorithm
from fullgraph.errors import CompileError, ConfigError, ShapeError
from fullgraph.formats import BOTH, Format, Orientation
from fullgraph.ops import scaling
from oracles import assert_same_bits

E4M3, E5M2 = Format.E4M3, Format.E5M2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")
TINY = 1.4e-45

by_format = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# The cast.

DATA = {
    "normal": lambda dtype: torch.randn(33, 20),
    "heavy-tailed": lambda dtype: torch.distributions.StudentT(3.0).sample((33, 20)),
    "zeros": lambda dtype: torch.zeros(5, 8),
    "minus zeros": lambda dtype: -torch.zeros(5, 8),
    "one outlier": lambda dtype: torch.randn(33, 20).index_fill_(0, torch.tensor(3), -3e4),
    "subnormals": lambda dtype: torch.randn(9, 16) * (torch.finfo(dtype).tiny / 4),
    "largest": lambda dtype: torch.full((3, 4), -torch.finfo(dtype).max),
    "infinite": lambda dtype: torch.tensor([[INF, 1.0, -INF, -0.0, 1e4]]),
    "not a number": lambda dtype: torch.tensor([[NAN, -NAN, -1.0, 3e4]]),
    "nothing but NaN": lambda dtype: torch.full((2, 3), NAN),
    "one element": lambda dtype: torch.full((1, 1), -3.0),
    "empty": lambda dtype: torch.empty(0, 4),
}
SCALES = [1.0, 448 / 3.3, 0.37, 1e-20, 1e20, 3.4028234663852886e38, TINY]


@pytest.mark.parametrize("data", DATA)
@by_format
@by_dtype
def test_cast(data, format, dtype):
    x = DATA[data](dtype).to(dtype)
    for factor, before in itertools.product(SCALES, (0.0, 2.0, INF)):
        amax = torch.tensor(before)
        scale = torch.tensor(factor)
        rowwise, columnwise, scale_inv = reference.cast_delayed(x, scale, amax, format)
        expected, decode = oracles_delayed.cast(x, factor, format.name)
        assert columnwise is None
        assert_same_bits(rowwise, expected)
        assert_same_bits(scale_inv, decode)
        assert_same_bits(amax, oracles_delayed.raised(before, x))
        assert_same_bits(scale, np.float32(factor))


@by_format
def test_cast_with_the_scale_of_its_amax_is_current_scaling(format):
    x = torch.randn(33, 20)
    amax = torch.zeros(())
    scale = reference.scale_from_amax(reference.amax(x), format, torch.float32)
    options = {"orientation": BOTH, "pad": 16}
    got = reference.cast_delayed(x, scale, amax, format, **options)
    expected = reference.cast_per_tensor(x, reference.amax(x), format, **options)
    for ours, theirs in zip((*got, amax), (*expected, reference.amax(x)), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("orientation", Orientation)
@pytest.mark.parametrize("pad", [1, 4, 16])
@pytest.mark.parametrize("shape", [(7, 33), (1, 1), (0, 5), (5, 0)])
def test_orientations_and_padding(orientation, pad, shape):
    x = torch.randn(shape)
    got = reference.cast_delayed(x, torch.tensor(7.0), None, E4M3, orientation=orientation, pad=pad)
    (rows, columns), (padded_rows, padded_columns) = (
        shape,
        [-(-size // pad) * pad for size in shape],
    )
    expected = torch.zeros((padded_rows, padded_columns), dtype=torch.uint8)
    expected[:rows, :columns] = torch.from_numpy(oracles_delayed.cast(x, 7.0, "E4M3")[0])
    copies = [
        expected[:rows] if orientation.rowwise else None,
        expected[:, :columns].t() if orientation.columnwise else None,
    ]
    for ours, theirs in zip(got[:2], copies, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_bits(ours, theirs)


VIEWS = {
    "transposed": lambda: torch.randn(9, 13).t(),
    "sliced": lambda: torch.randn(20, 30)[3::2, 1:-4:3],
    "expanded": lambda: torch.randn(1, 13).expand(9, 13),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_do_not_matter(view):
    x = VIEWS[view]()
    amaxes = torch.zeros(2)
    plain = x.clone(memory_format=torch.contiguous_format)
    got = reference.cast_delayed(x, torch.tensor(3.0), amaxes[0], E4M3, orientation=BOTH)
    expected = reference.cast_delayed(plain, torch.tensor(3.0), amaxes[1], E4M3, orientation=BOTH)
    for ours, theirs in zip((*got, amaxes[0]), (*expected, amaxes[1]), strict=True):
        assert_same_bits(ours, theirs)


def test_cast_uses_slots_of_a_state_and_owns_what_it_returns():
    scales, amaxes = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([5.0, 0.0, 7.0])
    x = torch.ones(4, 4)
    results = reference.cast_delayed(x, scales[1], amaxes[1], E4M3, orientation=BOTH)
    assert amaxes.tolist() == [5.0, 1.0, 7.0]
    owners = [t.untyped_storage().data_ptr() for t in (x, scales, amaxes, *results)]
    assert len(set(owners)) == len(owners)
    assert results[2].untyped_storage().nbytes() == 4


def test_only_matrices():
    with pytest.raises(
        ShapeError, match=r"cast_delayed: a matrix is needed \(x: float32\[2, 3, 4\]\)"
    ):
        reference.cast_delayed(torch.ones(2, 3, 4), torch.tensor(1.0), None, E4M3)


def test_the_cast_can_be_traced():
    def cast(x, scale, amax):
        return reference.cast_delayed(x, scale, amax[1], E4M3, orientation=BOTH, pad=16)

    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    for factor in (1.0, NAN, INF):
        x = torch.randn(7, 33).bfloat16() * factor
        amaxes = torch.zeros(2, 3)
        scale = torch.tensor(50.0)
        results = compiled(x, scale, amaxes[0]), cast(x, scale, amaxes[1])
        for ours, theirs in zip(*results, strict=True):
            assert_same_bits(ours, theirs)
        assert_same_bits(amaxes[0], amaxes[1])


# The rule.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history_length": 0}, "history_length must be an integer >= 1, got 0"),
        ({"history_length": 2.0}, "history_length must be an integer >= 1, got 2.0"),
        ({"history_length": True}, "history_length must be an integer >= 1, got True"),
        ({"algorithm": "mean"}, "unknown algorithm 'mean'"),
        ({"algorithm": max}, "unknown algorithm <built-in"),
        ({"margin": NAN}, "margin must be a small number, got nan"),
        ({"margin": 150}, "margin must be a small number, got 150"),
        ({"margin": -120}, "margin must be a small number, got -120"),
        ({"margin": "1"}, "margin must be a small number, got '1'"),
        ({"formats": (E4M3, E4M3, E4M3)}, "formats must be four of E4M3 and E5M2"),
        ({"formats": (E4M3, E4M3, E4M3, Format.E2M1)}, "formats must be four of E4M3 and E5M2"),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_meant(options, message):
    with pytest.raises(ConfigError, match=message):
        ScalingRule(**options)


def test_defaults_are_those_of_the_specification():
    rule = ScalingRule()
    assert (rule.history_length, rule.algorithm, rule.margin) == (1024, "max", 0)
    assert rule.formats == (E4M3, E4M3, E4M3, E5M2)
    assert rule.reduce_amax
    assert rule.largest == (448, 448, 448, 57344)
    assert ScalingRule(margin=1.5).largest[0] == 448 * 2**-1.5


def mean_of_the_largest_two(window):
    """An algorithm that other processes can import."""
    return window.topk(min(2, len(window)), dim=0).values.mean(0)


def test_algorithms_have_names():
    name = register_algorithm(mean_of_the_largest_two)
    assert name == f"{__name__}:mean_of_the_largest_two"
    assert find_algorithm(name) is mean_of_the_largest_two
    assert ScalingRule(algorithm=name).algorithm == name

    def made_here(row):
        return lambda window: window[row], lambda window: window[-row]

    first, second = made_here(0)
    name = register_algorithm(first)
    assert register_algorithm(first) == name
    assert find_algorithm(name) is first
    for other in (second, made_here(1)[0]):
        with pytest.raises(ConfigError, match="two functions are called"):
            register_algorithm(other)


def test_a_function_that_is_made_again_is_the_same_algorithm():
    def recipe():
        return register_algorithm(lambda window: window[0])

    assert recipe() == recipe()


def test_algorithms_that_are_not_there():
    with pytest.raises(CompileError, match="'torch:no_such' was not found in this process"):
        find_algorithm("torch:no_such")
    with pytest.raises(CompileError, match="'no_such_module:f' was not found"):
        find_algorithm("no_such_module:f")
    with pytest.raises(ConfigError, match="a function with a name is needed, got 3"):
        register_algorithm(3)


def test_algorithms_with_short_names():
    window = torch.tensor([[1.0, 5.0], [2.0, 4.0], [3.0, 0.0]])
    assert find_algorithm("max")(window).tolist() == [3, 5]
    assert find_algorithm("most_recent")(window).tolist() == [3, 0]


# The update.

RULES = [
    ScalingRule(4),
    ScalingRule(1),
    ScalingRule(7, "most_recent", margin=1),
    ScalingRule(2, margin=-2.5, formats=(E5M2, E4M3, E5M2, E4M3)),
    ScalingRule(5, f"{__name__}:mean_of_the_largest_two"),
]


class Model:
    """The states of some layers, ours and the oracle's."""

    def __init__(self, rules, device="cpu"):
        ones, zeros = torch.ones, torch.zeros
        self.rules = rules
        self.forward_amax = [zeros(3, device=device) for _ in rules]
        self.backward_amax = [zeros(1, device=device) for _ in rules]
        self.history = [zeros(rule.history_length - 1, 4, device=device) for rule in rules]
        self.forward_scale = [ones(3, device=device) for _ in rules]
        self.backward_scale = [ones(1, device=device) for _ in rules]
        functions = {r.algorithm: two_largest for r in rules if ":" in r.algorithm}
        self.oracle = [
            oracles_delayed.Layer(
                rule.history_length,
                functions.get(rule.algorithm, rule.algorithm),
                rule.margin,
                [f.name for f in rule.formats],
            )
            for rule in rules
        ]

    @property
    def arguments(self):
        return (
            self.forward_amax,
            self.backward_amax,
            self.history,
            self.forward_scale,
            self.backward_scale,
            scaling.encode_rules([encode(rule) for rule in self.rules]),
            "",
        )

    def record(self, amaxes):
        for layer, row in enumerate(amaxes):
            self.forward_amax[layer].copy_(row[:3])
            self.backward_amax[layer].copy_(row[3:])
            self.oracle[layer].record(row.numpy())

    def assert_same(self):
        for i, layer in enumerate(self.oracle):
            assert_same_bits(
                torch.cat([self.forward_scale[i], self.backward_scale[i]]), layer.scale
            )
            recorded = torch.cat([self.forward_amax[i], self.backward_amax[i]])[None]
            assert_same_bits(torch.cat([recorded, self.history[i]]), layer.history)


def two_largest(window):
    """What `mean_of_the_largest_two` does, in float32."""
    numbers = np.sort(np.array(window, np.float32))[::-1][:2]
    with np.errstate(over="ignore"):
        return float(np.mean(numbers, dtype=np.float32))


def random_amaxes(layers):
    """Amaxes as they may come: usual ones, and everything special, often zero."""
    pool = torch.tensor([0.0, 0.0, 0.0, INF, NAN, TINY, 1e-39, 1e-5, 3.3, 448.0, 6e4, 3.4e38])
    special = pool[torch.randint(len(pool), (layers, 4))]
    usual = torch.rand(layers, 4) * 2.0 ** torch.randint(-20, 20, (layers, 4))
    return torch.where(torch.rand(layers, 4) < 0.5, special, usual)


def test_update_over_random_sequences():
    model = Model(RULES * 3)
    for _ in range(60):
        model.record(random_amaxes(len(model.rules)))
        scaling.update_scales(*model.arguments)
        for layer in model.oracle:
            layer.update()
        model.assert_same()


def test_update_by_hand():
    """The semantics in numbers, apart from both implementations."""
    model = Model([ScalingRule(3)])

    def step(*amaxes):
        model.record(torch.tensor([amaxes]))
        scaling.update_scales(*model.arguments)
        assert not model.forward_amax[0].any()
        assert not model.backward_amax[0].any()
        return [*model.forward_scale[0].tolist(), *model.backward_scale[0].tolist()]

    # E4M3 448, E5M2 57344; the output is never cast.
    assert step(2.0, 4.0, 0.0, 1.0) == [224, 112, 1, 57344]
    # The largest of three steps counts; infinity and NaN count as nothing.
    assert step(1.0, INF, 0.0, NAN) == [224, 112, 1, 57344]
    assert model.history[0][:, 0].tolist() == [2, 1]
    assert model.history[0][:, 3].tolist() == [0, 1]
    assert model.history[0][:, 1].tolist() == [0, 4]
    # A slot without an amax does not roll.
    assert step(0.0, 3.0, 0.0, 2.0) == [224, 112, 1, 28672]
    assert model.history[0][:, 0].tolist() == [2, 1]
    # Two leaves the window, and four.
    assert step(0.5, 3.0, 0.0, 2.0) == [224, 112, 1, 28672]
    assert step(0.5, 3.0, 0.0, 2.0)[0] == 448
    assert step(0.5, 8.0, 0.0, 2.0) == [896, 56, 1, 28672]
    # The quotient overflows: the largest finite number.
    for _ in range(3):
        scales = step(TINY, 8.0, 0.0, 2.0)
    assert scales[0] == 3.4028234663852886e38


def test_nan_in_a_history_is_dropped():
    model = Model([ScalingRule(3)])
    model.history[0].copy_(torch.tensor([[NAN] * 4, [2.0] * 4]))
    model.record(torch.ones(1, 4))
    scaling.update_scales(*model.arguments)
    assert model.forward_scale[0].tolist() == [224] * 3


def test_scales_are_divided_exactly():
    """A reciprocal times a number is one unit off for a quarter of all amaxes."""
    rules = [ScalingRule(1)] * 500
    model = Model(rules)
    amaxes = torch.rand(len(rules), 4) + 0.5
    model.record(amaxes)
    scaling.update_scales(*model.arguments)
    expected = np.float32([448, 448, 448, 57344]) / amaxes.numpy()
    actual = [
        torch.cat(pair) for pair in zip(model.forward_scale, model.backward_scale, strict=True)
    ]
    assert_same_bits(torch.stack(actual), expected)
    model.forward_amax[3].add_(1)
    with pytest.raises(AssertionError, match="differ, first at"):
        model.assert_same()


def test_an_algorithm_of_the_wrong_shape():
    def forgetful(window):
        return window.max()

    model = Model([ScalingRule(3, register_algorithm(forgetful))])
    with pytest.raises(ConfigError, match=r"returned float32\[\] for float32\[3, 4\]"):
        scaling.update_scales(*model.arguments)


def test_update_is_a_proper_op():
    for rules in (RULES, [ScalingRule(3)]):
        model = Model(rules)
        model.record(random_amaxes(len(rules)))
        torch.library.opcheck(torch.ops.fullgraph.update_scales.default, model.arguments)


def test_update_could_be_captured():
    model = Model(RULES)
    model.record(random_amaxes(len(RULES)))
    cuda_graph_lint(scaling.update_scales, *model.arguments)


class CountLaunches(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the torch ops that do something."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = func.is_view or "unbind" in str(func) or "split" in str(func)
        self.count += not (is_view or func is torch.ops.fullgraph.update_scales.default)
        return func(*args, **(kwargs or {}))


def test_the_number_of_launches_does_not_grow_with_the_layers():
    counts = []
    for layers in (2, 50):
        model = Model([ScalingRule(8)] * layers)
        with CountLaunches() as launches:
            scaling._update(*model.arguments)
        counts.append(launches.count)
    few, many = counts
    assert 10 < few <= 40
    assert many == few


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_update_inside_a_compiled_function(backend):
    models = Model(RULES), Model(RULES)

    def step(forward_amax, *rest):
        forward_amax[0].add_(1)  # changed before the update, read after it
        scaling.update_scales(forward_amax, *rest)
        return rest[2][0] * 2

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(3):
        amaxes = random_amaxes(len(RULES))
        results = []
        for model, function in zip(models, (compiled, step), strict=True):
            model.record(amaxes)
            results.append(function(*model.arguments))
        assert_same_bits(*results)
        for ours, theirs in zip(models[0].arguments[:5], models[1].arguments[:5], strict=True):
            for left, right in zip(ours, theirs, strict=True):
                assert_same_bits(left, right)


# The warning.


@pytest.fixture(autouse=True)
def _fresh_counts(monkeypatch):
    monkeypatch.setattr(scaling, "_COUNTS", {})
    monkeypatch.setattr(scaling, "_RULES", {})
    monkeypatch.setattr(scaling, "PATIENCE", 5)


def use(states, times):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            for state in states:
                scaling.count_use(state)
    return [str(w.message) for w in caught]


def test_scales_that_are_never_updated():
    model = Model([ScalingRule(2)] * 3)
    assert use(model.forward_scale, 4) == []
    (message,) = use(model.forward_scale, 20)
    assert message.startswith("a layer with delayed scaling ran 5 times in a row without an update")
    assert "\nWhy: " in message
    assert "\nDo: call fullgraph.update_scales(model)" in message
    scaling.update_scales(*model.arguments)
    assert use(model.forward_scale, 4) == []
    assert len(use(model.forward_scale, 20)) == 1


def test_an_update_of_other_layers_does_not_count():
    model, other = Model([ScalingRule(2)]), Model([ScalingRule(2)])
    use([*model.forward_scale, *other.forward_scale], 4)
    scaling.update_scales(*other.arguments)
    assert use(other.forward_scale, 4) == []
    assert len(use(model.forward_scale, 1)) == 1


def test_the_rule_of_a_use_is_known_until_the_update():
    model = Model([ScalingRule(2)])
    assert scaling.used_rule(model.forward_scale[0]) == ""
    scaling.count_use(model.forward_scale[0], "a rule")
    assert scaling.used_rule(model.forward_scale[0]) == "a rule"
    scaling.update_scales(*model.arguments)
    assert scaling.used_rule(model.forward_scale[0]) == ""


def test_updates_of_copies_count_for_all():
    """As where a compiler hands the op copies of what it mutates: no address is known then."""
    model, copies = Model([ScalingRule(2)]), Model([ScalingRule(2)])
    use(model.forward_scale, 4)
    scaling.update_scales(*copies.arguments)
    assert use(model.forward_scale, 4) == []


def test_oracle_notices_a_difference():
    layer = oracles_delayed.Layer(2, "max", 0, ["E4M3"] * 3 + ["E5M2"])
    layer.record([2.0, 0, 0, 0])
    layer.update()
    assert layer.scale[0] == 224
    assert layer.history.tolist() == [[0, 0, 0, 0], [2, 0, 0, 0]]
    assert oracles_delayed.raised(1.0, torch.tensor([NAN, -2.0])) == 2
    assert math.isinf(oracles_delayed.raised(1.0, torch.tensor([-INF])))
    data, decode = oracles_delayed.cast(torch.tensor([[1.0]]), 2.0, "E4M3")
    assert oracles.decode_code("E4M3", int(data[0, 0])) == 2
    assert decode == 0.5
