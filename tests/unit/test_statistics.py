"""Statistics: the row of a cast against NumPy, for every quantizer; steps, files and pictures of a collector."""

import copy
import dataclasses
import functools
import gc
import itertools
import json
import math
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import fullgraph as fg
import oracles
import oracles_nvfp4
from fullgraph.errors import ConfigError
from fullgraph.formats import Scaling
from fullgraph.ops.statistics import COLUMN_NAMES, COLUMNS, StatisticsBuffers, record
from fullgraph.statistics import linears_of
from fullgraph.tensor import NO_STATE, PLAIN, CastState, Layout, QuantizedParts
from oracles_quantizers import CASES, QUANTIZERS, copies_of, drawn_seed, matrix_of, state_of

NATIVE = Layout(frozenset(Scaling))
DELAYED = fg.DelayedQuantizer(fg.Format.E4M3)
INF, NAN = float("inf"), float("nan")
# The largest value of a format, and where rounding to it ends if there were more: half a step above.
RANGES = {"E4M3": (448, 464), "E5M2": (57344, 61440), "E2M1": (6, 7)}
ALL_CASES = [*CASES, *[("delayed", orientation) for orientation in fg.Orientation]]
by_case = pytest.mark.parametrize(
    ("name", "orientation"), ALL_CASES, ids=lambda value: getattr(value, "name", value)
)


def quantizer_of(name):
    return DELAYED if name == "delayed" else QUANTIZERS[name]


def cast(quantizer, x, orientation, layout=PLAIN, scale=1.0):
    """The parts of a cast, and the row that records it."""
    state = state_of(quantizer)
    if quantizer.is_delayed:
        state = CastState(encode_scale=torch.tensor(scale))
    parts = quantizer.quantize(x, orientation, layout, state)
    row = torch.zeros(COLUMNS)
    record(row, x, parts)
    return parts, row


def named(row):
    return dict(zip(COLUMN_NAMES, row.tolist(), strict=True))


@functools.cache
def sample(shape, dtype=torch.float32, special=None):
    """Values of many magnitudes, some of them lost in a cast, and perhaps one that is not finite."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    x.view(-1)[::7] *= 1e-4
    x.view(-1)[5] = 0
    if special is not None:
        x.view(-1)[40] = special
    return x.to(dtype)


def values_and_decoded(name, orientation, *sample_of, scale=1.0):
    """By the oracles: what was cast and what it decodes to, float64, in the basis of the codes; and the format."""
    quantizer, x = quantizer_of(name), sample(*sample_of)
    column = not orientation.rowwise
    member = quantizer
    if isinstance(quantizer, fg.HybridQuantizer):
        member = quantizer.columnwise if column else quantizer.rowwise
    copies = both_copies(name, *sample_of, scale=scale)
    values, decoded = matrix_of(x).float().numpy(), copies[column].values
    values = values.T if column else values
    if column and getattr(member, "hadamard", False):
        filled = np.pad(values, ((0, 0), (0, -values.shape[1] % 16)))
        stored = copies[column]
        with np.errstate(invalid="ignore"):
            values = oracles_nvfp4.hadamard_groups(np.ascontiguousarray(filled))
            decoded = oracles_nvfp4.decode(stored.data, stored.scale_inv) * stored.tensor_scale_inv
    return values.astype(np.float64), decoded.astype(np.float64), member.format.name


@functools.cache
def both_copies(name, *sample_of, scale):
    """The oracles are slow."""
    x = matrix_of(sample(*sample_of))
    return copies_of(quantizer_of(name), x, scale=scale, seed=drawn_seed())


def expected_row(name, orientation, *sample_of, scale=1.0):
    """The row of `sample(*sample_of)`, without saturation."""
    values, decoded, _ = values_and_decoded(name, orientation, *sample_of, scale=scale)
    usable = np.isfinite(values) & np.isfinite(decoded)
    values, decoded, size = values[usable], decoded[usable], values.size
    return {
        "amax": np.abs(values).max(initial=0.0),
        "elements": size,
        "nonfinite": size - len(values),
        "underflow": ((values != 0) & (decoded == 0)).sum(),
        "signal": (values**2).sum(),
        "noise": ((values - decoded) ** 2).sum(),
        "casts": 1,
    }


def assert_row(row, expected):
    for name, value in named(row).items():
        if name != "saturation":
            assert value == pytest.approx(expected[name], rel=1e-5, abs=1e-30), name


# The row of one cast.


LAYOUTS = (PLAIN, NATIVE)
SCALE = 448 / 3.0  # of delayed scaling: saturates beyond 3


@by_case
def test_a_row_against_the_oracles(name, orientation):
    for sample_of in (((19, 35),), ((2, 3, 20), torch.bfloat16)):
        x = sample(*sample_of)
        expected = expected_row(name, orientation, *sample_of, scale=SCALE)
        for layout in LAYOUTS:
            matrix = (
                x if layout == PLAIN else matrix_of(x)
            )  # native ones are made in ops, of matrices
            parts, row = cast(quantizer_of(name), matrix, orientation, layout, scale=SCALE)
            assert_row(row, expected)
            assert expected["noise"] > 0
        record(row, x, parts)
        assert_row(row, {n: v if n == "amax" else 2 * v for n, v in expected.items()})


@by_case
def test_nothing_to_cast(name, orientation):
    for shape in ((0, 5), (5, 0), (0,), (2, 0, 3)):
        _, row = cast(quantizer_of(name), torch.randn(shape), orientation)
        assert named(row) == dict.fromkeys(COLUMN_NAMES, 0.0) | {"casts": 1.0}


@by_case
@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_what_is_not_finite(name, orientation, special):
    sample_of = (6, 35), torch.float32, special
    _, row = cast(quantizer_of(name), sample(*sample_of), orientation)
    assert_row(row, expected_row(name, orientation, *sample_of))
    assert row[COLUMN_NAMES.index("nonfinite")] >= 1
    assert row.isfinite().all()


@pytest.mark.parametrize("format", [fg.Format.E4M3, fg.Format.E5M2], ids=lambda f: f.name)
def test_saturation_of_delayed_scaling(format):
    largest, end = RANGES[format.name]
    x = torch.tensor([[largest, end, -end, end * 1.001, -end * 1.001, 2 * end, 0.5 * largest]])
    for scale in (1.0, 2.0**-10):
        _, row = cast(fg.DelayedQuantizer(format), x / scale, fg.BOTH, scale=scale)
        assert named(row)["saturation"] == 3
    _, row = cast(fg.DelayedQuantizer(format), x * (largest / 2.1 / end), fg.BOTH)
    assert named(row)["saturation"] == 0


@by_case
def test_saturation_against_the_definition(name, orientation):
    """Beyond what half a step explains, where the value is the largest of its group."""
    quantizer = quantizer_of(name)
    if getattr(quantizer, "columnwise_from_rowwise", False):
        pytest.skip("the columnwise copy is one of other values")
    values, decoded, format = values_and_decoded(name, orientation, (19, 35), scale=SCALE)
    largest, end = RANGES[format]
    for layout in LAYOUTS:
        parts, row = cast(quantizer, sample((19, 35)), orientation, layout, SCALE)
        has_largest = largest_codes(parts, format, orientation, values.shape)
        beyond = (np.abs(values) > np.abs(decoded) * end / largest) & (decoded != 0)
        expected = (has_largest & beyond).sum()
        assert named(row)["saturation"] == expected
        if "nvfp4" in name:
            assert expected < 3  # in blocks whose scale is a subnormal
        else:
            assert (expected > 0) == (name in ("delayed", "mx-floor"))


def largest_codes(parts, format, orientation, shape):
    """Where the largest code stands, from the payload, by shifts; bool of `shape`."""
    codes = parts.payload(fg.ROWWISE if orientation.rowwise else fg.COLUMNWISE).numpy()
    if format == "E2M1":
        codes = np.stack((codes % 16, codes // 16), -1).reshape(len(codes), -1)
        return (codes % 8 == 7)[:, : shape[1]]
    return (codes % 128 == {"E4M3": 0x7E, "E5M2": 0x7B}[format])[:, : shape[1]]


@dataclasses.dataclass(frozen=True)
class EighthsQuantizer(fg.Quantizer):
    """A quantizer of one's own, whose codes only it can read: multiples of 1/8 from -16 on."""

    format: fg.Format = fg.Format.E4M3  # says how wide a code is

    def quantize(self, x, orientation, layout=PLAIN, state=NO_STATE):
        codes = (x * 8 + 128).round().clamp(0, 255).to(torch.uint8)
        rowwise = codes if orientation.rowwise else None
        columnwise = codes.t().contiguous() if orientation.columnwise else None
        return QuantizedParts(rowwise, columnwise, quantizer=self, dtype=x.dtype)

    def decode_matrix(self, parts, orientation):
        return (parts.payload(orientation).float() - 128) / 8


@pytest.mark.parametrize("orientation", fg.Orientation, ids=lambda o: o.name)
def test_a_quantizer_that_only_its_own_code_can_read(orientation):
    x = 3 * torch.randn(8, 20)
    x[2] = 0.05
    parts, row = cast(EighthsQuantizer(), x, orientation)
    numbers = named(row)
    assert math.isnan(numbers.pop("saturation"))
    assert numbers.pop("noise") == pytest.approx((x - parts.decode()).square().sum().item())
    assert numbers.pop("signal") == pytest.approx(x.square().sum().item())
    underflow = ((x * 8).round() == 0).sum().item()
    assert underflow >= 20
    expected = (x.abs().max().item(), 160, 0, underflow, 1)
    assert tuple(numbers.values()) == expected  # amax, elements, nonfinite, underflow, casts


def test_a_row_changes_in_place_and_works_on_fake_tensors():
    rows = torch.zeros(3, COLUMNS)
    x = torch.randn(4, 32).bfloat16()
    quantizer = fg.MXQuantizer()
    record(rows[1], x, quantizer.quantize(x, fg.BOTH))
    assert (rows[[0, 2]] == 0).all()
    assert rows[1, -1] == 1
    with FakeTensorMode():
        fake = torch.empty(4, 32)
        record(torch.zeros(COLUMNS), fake, quantizer.quantize(fake, fg.BOTH))


# Steps.


def new_model(recipe="fp8-current"):
    torch.manual_seed(0)
    return nn.Sequential(
        fg.Linear(32, 16, recipe=recipe), nn.GELU(), fg.Linear(16, 32, recipe=recipe)
    )


def train(model, statistics, steps, factor=1.0):
    for number in range(steps):
        torch.manual_seed(number)
        model(factor * torch.randn(8, 32, requires_grad=True)).square().sum().backward()
        statistics.step()


def test_which_steps_are_sampled():
    model = new_model()
    with fg.collect_statistics(model, every=3) as statistics:
        sampled = []
        for _ in range(7):
            sampled.append((statistics.is_sampling, model[0].statistics is not None))
            train(model, statistics, 1)
    assert sampled == [(number % 3 == 0,) * 2 for number in range(7)]
    records = statistics.records
    assert [record.step for record in records] == [1] * 6 + [4] * 6 + [7] * 6
    assert [(record.layer, record.tensor) for record in records[:6]] == [
        (layer, tensor) for layer in "02" for tensor in ("input", "weight", "grad_output")
    ]
    assert all(record.casts == 1 for record in records)
    assert [record.elements for record in records[:6]] == [256, 512, 128, 128, 512, 256]
    assert model[0].statistics is None
    assert not statistics.is_sampling


def test_the_numbers_of_a_record():
    model = new_model()
    with fg.collect_statistics(model) as statistics:
        torch.manual_seed(0)
        x = torch.randn(8, 32)
        x[0] *= 1e-6
        model(x)
        statistics.step()
    found = statistics.records[0]
    decoded = fg.quantize(x, QUANTIZERS["per-tensor"]).dequantize()
    lost = (x != 0) & (decoded == 0)
    ratio = x.double().square().sum() / (x.double() - decoded).square().sum()
    assert found.amax == x.abs().max()
    assert found.underflow == lost.sum() / 256 >= 32 / 256
    assert (found.saturation, found.nonfinite) == (0, 0)
    assert found.sqnr_db == pytest.approx(10 * math.log10(ratio), abs=1e-4)
    assert [record.tensor for record in statistics.records] == ["input", "weight"] * 2


def test_microbatches_add_up():
    model = new_model()
    with fg.collect_statistics(model) as statistics:
        for factor in (1.0, 100.0, 1.0):
            model(factor * torch.ones(8, 32)).sum().backward()
        statistics.step()
    first = statistics.records[0]
    assert (first.casts, first.elements, first.amax) == (3, 3 * 256, 100.0)
    assert first.sqnr_db is None  # all of it exact
    assert statistics.records[2].casts == 3


def test_numbers_that_there_are_not():
    layer = fg.Linear(32, 16, recipe="fp8-current")
    with fg.collect_statistics(layer) as statistics:
        layer(torch.zeros(0, 32))
        statistics.step()
    empty = statistics.records[0]
    assert (empty.layer, empty.elements, empty.casts, empty.amax) == ("", 0, 1, 0.0)
    assert [empty.underflow, empty.saturation, empty.nonfinite, empty.sqnr_db] == [None] * 4


def test_what_is_not_cast_has_no_record():
    model = nn.Sequential(new_model("bf16"), new_model("fp8-current"))
    with torch.no_grad(), fg.collect_statistics(model, every=1) as statistics:
        model(torch.randn(4, 32))
        model[1][0](torch.randn(4, 32), quantized_output=True)
        statistics.step()
        statistics.step()
    assert [(r.step, r.layer, r.tensor) for r in statistics.records] == [
        *[(1, "1.0", tensor) for tensor in ("input", "weight", "output")],
        *[(1, "1.2", tensor) for tensor in ("input", "weight")],
    ]


def test_delayed_scaling_shows_what_saturates():
    model = new_model("fp8-delayed")
    with fg.collect_statistics(model, every=1) as statistics:
        for factor in (1.0, 10.0):
            model(factor * torch.randn(8, 32, requires_grad=True)).sum().backward()
            fg.update_scales(model)
            statistics.step()
    before, after = (r for r in statistics.records if (r.layer, r.tensor) == ("0", "input"))
    assert before.saturation == 0
    assert after.saturation > 0.5


def test_copies_collect_nothing():
    model = new_model()
    with fg.collect_statistics(model, every=1) as statistics:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert isinstance(model[0].statistics, StatisticsBuffers)
            assert other[0].statistics is None
            with fg.collect_statistics(other) as theirs:
                train(other, theirs, 1)
            assert len(theirs.records) == 6
        train(model, statistics, 1)
    assert [record.casts for record in statistics.records] == [1] * 6


def test_two_models():
    models = new_model(), new_model()
    with fg.collect_statistics(models[0]) as one, fg.collect_statistics(models[1]) as other:
        train(models[0], one, 1)
        train(models[1], other, 1, factor=2.0)
    pairs = list(zip(one.records, other.records, strict=True))
    assert pairs[0][1].amax == 2 * pairs[0][0].amax
    assert all(ours.sqnr_db is not None for ours, _ in pairs)


def test_a_model_that_moves(monkeypatch):
    model = new_model()
    statistics = fg.collect_statistics(model, every=1)
    train(model, statistics, 1)
    before = model[0].statistics
    monkeypatch.setattr(StatisticsBuffers, "device", torch.device("cuda", 0))
    statistics.step()
    assert model[0].statistics is not before  # made anew where the parameters are
    monkeypatch.undo()
    statistics.close()


def test_dropped_statistics_let_the_layers_go(tmp_path):
    model = new_model()
    statistics = fg.collect_statistics(model, path=tmp_path / "a.jsonl")
    assert model[0].statistics is not None
    del statistics
    gc.collect()
    assert model[0].statistics is None
    fg.collect_statistics(model).close()


def test_names_of_compiled_modules():
    model = nn.Sequential(torch.compile(new_model()), fg.Linear(8, 8))
    assert list(linears_of(torch.compile(model))) == ["0.0", "0.2", "1"]


def test_closing():
    model = new_model()
    statistics = fg.collect_statistics(model)
    train(model, statistics, 1)
    statistics.close()
    statistics.close()
    assert len(statistics.records) == 6
    with pytest.raises(ConfigError, match="Statistics.step: the statistics are closed"):
        statistics.step()


REFUSED = {
    "no model": (
        lambda m, p: fg.collect_statistics(m.forward),
        "statistics need a torch.nn.Module",
    ),
    "no layer": (lambda m, p: fg.collect_statistics(nn.Linear(2, 2)), "no fg.Linear in Linear"),
    "no data": (
        lambda m, p: fg.collect_statistics(fg.Linear(2, 2, device="meta")),
        "the layer '' is on the meta device",
    ),
    "every": (
        lambda m, p: fg.collect_statistics(m, every=0),
        "every must be an integer >= 1, got 0",
    ),
    "every half": (lambda m, p: fg.collect_statistics(m, every=0.5), "every must be an integer"),
    "first step": (lambda m, p: fg.collect_statistics(m, first_step=0), "first_step must be an"),
    "path": (lambda m, p: fg.collect_statistics(m, path=p), "cannot write .*: Is a directory"),
    "no directory": (
        lambda m, p: fg.collect_statistics(m, path=p / "no" / "file"),
        "cannot write .*: No such file",
    ),
    "not there": (lambda m, p: fg.read_statistics(p / "no"), "cannot read .*: No such file"),
    "metric": (
        lambda m, p: fg.plot_statistics([], p, metric="loss"),
        "unknown metric 'loss'\nDo: use one of sqnr_db, underflow, saturation, nonfinite, amax",
    ),
    "tensor": (
        lambda m, p: fg.plot_statistics([], p, tensor="bias"),
        "unknown tensor 'bias'\nDo: use one of input, weight, output, grad_output",
    ),
    "no records": (lambda m, p: fg.plot_statistics([], p), "no record of any tensor to draw"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message, tmp_path):
    model = new_model()
    with pytest.raises(ConfigError, match=message):
        call(model, tmp_path)
    assert model[0].statistics is None
    fg.collect_statistics(model).close()  # nothing is left of the attempt


def test_only_one_collects():
    model = new_model()
    message = "2 layers collect statistics already, the first of them '0.0'"
    with fg.collect_statistics(model, every=2) as statistics:
        for _ in range(2):  # in a sampled step, and in one that is not
            with pytest.raises(ConfigError, match=message):
                fg.collect_statistics(nn.Sequential(model))
            statistics.step()


# Files and pictures.


def test_the_file_has_the_records(tmp_path):
    path, model = tmp_path / "a.jsonl", new_model()
    with fg.collect_statistics(model, every=2, path=path) as statistics:
        train(model, statistics, 2)
        assert (
            len(path.read_text().splitlines()) == 6
        )  # a step later at most, while the training runs
        train(model, statistics, 1)
    assert fg.read_statistics(path) == statistics.records
    assert len(statistics.records) == 12
    line = json.loads(path.read_text().splitlines()[0])
    assert line == dataclasses.asdict(statistics.records[0])
    assert (line["step"], line["layer"], line["tensor"]) == (1, "0", "input")


def test_the_file_of_a_training_that_goes_on(tmp_path):
    path, model = tmp_path / "a.jsonl", new_model()
    with fg.collect_statistics(model, every=2, path=path) as statistics:
        train(model, statistics, 5)
    with fg.collect_statistics(model, every=2, path=path, first_step=4) as statistics:
        assert not statistics.is_sampling
        train(model, statistics, 4)
    steps = [record.step for record in fg.read_statistics(path)]
    assert list(dict.fromkeys(steps)) == [1, 3, 5, 7]
    assert len(steps) == 4 * 6
    fg.collect_statistics(model, path=path).close()
    assert path.read_text() == ""


def test_an_interrupted_line_is_left_out(tmp_path):
    path, model = tmp_path / "a.jsonl", new_model()
    with fg.collect_statistics(model, path=path) as statistics:
        train(model, statistics, 1)
    path.write_text(path.read_text()[:-9])
    assert fg.read_statistics(path) == statistics.records[:-1]


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', '{"loss": 2}', "nan"])
def test_a_line_that_is_no_record(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="line 1 of .* is no record of statistics"):
        fg.read_statistics(path)


def some_records(layers=5, steps=4, **numbers):
    """Records of two tensors, with numbers that grow from layer to layer."""
    found = []
    for step, layer, tensor in itertools.product(
        range(1, 1 + 100 * steps, 100), range(layers), ("input", "grad_output")
    ):
        record = fg.TensorStatistics(
            step=step,
            layer=f"blocks.{layer}.qkv",
            tensor=tensor,
            amax=2.0**layer,
            underflow=layer / 100,
            saturation=None,
            nonfinite=0.0,
            sqnr_db=30.0 - layer,
            elements=8,
            casts=1,
        )
        found.append(dataclasses.replace(record, **numbers))
    return found


def drawn(records, tmp_path, monkeypatch, **options):
    """The figure that is drawn, and its maps as arrays, by tensor."""
    agg = pytest.importorskip("matplotlib.backends.backend_agg", reason="needs the extra cli")
    figures = []

    class Canvas(agg.FigureCanvasAgg):
        def __init__(self, figure):
            super().__init__(figure)
            figures.append(figure)

    monkeypatch.setattr(agg, "FigureCanvasAgg", Canvas)
    path = tmp_path / "a.png"
    fg.plot_statistics(records, path, **options)
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    axes = [ax for ax in figure.axes if ax.get_title()]
    return figure, {ax.get_title(): ax.images[0].get_array() for ax in axes}


def test_a_picture(tmp_path, monkeypatch):
    figure, maps = drawn(some_records(), tmp_path, monkeypatch, metric="underflow", tensor="input")
    (cells,) = maps.values()
    assert list(maps) == ["input"]
    assert cells.tolist() == [[float(layer)] * 4 for layer in range(5)]
    axes, bar = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == [
        *("blocks.0.qkv", "blocks.1.qkv")
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "101", "201", "301"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "layer")
    assert bar.get_ylabel() == "underflow: values that became zero (%)"
    assert axes.images[0].get_clim() == (0, 4)


@pytest.mark.parametrize("metric", ["sqnr_db", "underflow", "saturation", "nonfinite", "amax"])
def test_every_metric_and_tensor(metric, tmp_path, monkeypatch):
    _, maps = drawn(some_records(), tmp_path, monkeypatch, metric=metric)
    assert list(maps) == ["input", "grad_output"]
    number = maps["input"][1, 0]
    expected = {"sqnr_db": 29, "underflow": 1, "saturation": NAN, "nonfinite": 0, "amax": 2}
    assert number is np.ma.masked if metric == "saturation" else number == expected[metric]


def test_pictures_of_little_and_of_much(tmp_path, monkeypatch):
    for numbers in ({}, {"amax": 0.0}, {"sqnr_db": None}):
        for metric in ("amax", "sqnr_db"):
            drawn(some_records(1, 1, **numbers), tmp_path, monkeypatch, metric=metric)
            monkeypatch.undo()
    figure, _ = drawn(some_records(150, 40), tmp_path, monkeypatch)
    assert len(figure.axes[0].get_yticklabels()) <= 60
    assert len(figure.axes[0].get_xticklabels()) <= 6


def test_the_picture_of_a_training(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra cli")
    layer = fg.Linear(32, 16, recipe="nvfp4")
    with fg.collect_statistics(layer) as statistics:
        layer(torch.randn(4, 32))
        statistics.step()
    statistics.plot(tmp_path / "a.png", "underflow", "input")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no record of grad_output to draw"):
        statistics.plot(tmp_path / "a.png", tensor="grad_output")
    with pytest.raises(ConfigError, match="cannot write .*: No such file"):
        statistics.plot(tmp_path / "no" / "a.png")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib is not installed\nWhy: .*\nDo: pip install"):
        fg.plot_statistics(some_records(), tmp_path / "a.png")


def test_oracle_ranges():
    """The ends of the ranges above: half of a step of the table beyond its last value."""
    for name, (largest, end) in RANGES.items():
        table = oracles.finite_values(name)
        assert table[-1] == largest
        assert end == largest + (table[-1] - table[-2]) / 2


def test_two_collections_cannot_write_one_file(tmp_path):
    first, second = (fg.Linear(32, 8, recipe="mxfp8") for _ in range(2))
    path = tmp_path / "statistics.jsonl"
    with fg.collect_statistics(first, path=path):
        with pytest.raises(ConfigError, match="being written by another collection"):
            fg.collect_statistics(second, path=path)
        assert second.statistics is None
    fg.collect_statistics(second, path=path).close()
