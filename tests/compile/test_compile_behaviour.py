"""How often a model is compiled: token counts, many layers, equal blocks, recipes in turn, train and eval.

And who is named when it is once too often.
"""

import contextlib
import copy
import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

import fullgraph as fg
from fullgraph import testing
from linear_cases import (
    E4M3,
    LOW_PRECISION,
    RECIPES,
    Case,
    K,
    N,
    assert_same_results,
    batch,
    gradients,
    same_random_numbers,
    state_of,
    step,
    tensors,
)
from oracles import assert_same_bits

# Dynamo looks for the gradient of what a compiled block hands to the next one; hidden from users, an error here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

E5M2 = fg.PerTensorQuantizer(fg.Format.E5M2)
recipes = pytest.mark.parametrize("recipe", RECIPES)


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def graphs():
    """How many graphs Dynamo has made since the test began."""
    return counters["stats"]["unique_graphs"]


# One graph for each configuration.

CONFIGURATIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "quantized weight": {"quantized_weight": True},
    "bias returned": {"return_bias": True},
    "float32": {"dtype": torch.float32},
}
"""Options of a layer, by name; a new one is tested by a new line."""


def first(output):
    return output[0] if isinstance(output, tuple) else output


@recipes
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_one_graph_for_a_configuration(name, recipe):
    options = {"dtype": torch.bfloat16, **CONFIGURATIONS[name]}
    for layer in [fg.Linear(K, N, recipe=recipe, **options) for _ in range(2)]:
        function = compiled(layer)
        for _ in range(2):
            x, grad_output = batch(24, dtype=options["dtype"])
            got = step(layer, x, grad_output, lambda x, f=function: first(f(x)))
            with torch.random.fork_rng():
                expected = step(layer, x, grad_output, lambda x, f=layer: first(f(x)))
            assert_same_results(got, expected)
            if layer.scaling_state.rule:
                fg.update_scales(layer)
    assert graphs() == 1


# Token counts.

COUNTS = (24, 7, 50, 13, 33, 2, 100, 64, 5, 17, 96, 3)


def assert_right_for(layer, function, counts, leading=(), mark=None):
    for tokens in counts:
        x, grad_output = tensors((*leading, tokens, K), (*leading, tokens, N))
        marked = x.clone()
        if mark is not None:
            mark(marked, 0)
        got = step(layer, marked, grad_output, function)
        assert_same_results(got, step(layer, x, grad_output))


@recipes
@pytest.mark.parametrize("leading", [(), (2,)], ids=["matrix", "batch of sequences"])
def test_twelve_token_counts_are_two_graphs(leading, recipe):
    """The first size is taken for constant, the second one makes it a variable."""
    layer = Case(recipe).layer()
    function = compiled(layer)
    assert_right_for(layer, function, COUNTS[:1], leading)
    assert graphs() == 1
    assert_right_for(layer, function, COUNTS[1:], leading)
    assert graphs() == 2


@recipes
def test_one_token_and_none_have_graphs_of_their_own(recipe):
    """Torch takes the sizes 0 and 1 for constants, always."""
    layer = Case(recipe).layer()
    function = compiled(layer, dynamic=True)
    assert_right_for(layer, function, COUNTS)
    assert graphs() == 1
    assert_right_for(layer, function, (1, 0, 1, 0))
    assert graphs() == 3


@recipes
@pytest.mark.parametrize(
    ("mark", "counts"),
    [
        (torch._dynamo.mark_dynamic, COUNTS),
        (torch._dynamo.decorators.mark_unbacked, (*COUNTS, 1, 0)),
    ],
    ids=["dynamic", "unbacked"],
)
def test_a_marked_dimension_is_one_graph(mark, counts, recipe):
    layer = Case(recipe).layer()
    leaves = [tensors((tokens, K)).requires_grad_() for tokens in counts]
    function = compiled(layer)
    for leaf in leaves:
        mark(leaf, 0)
        output = function(leaf)
        assert_same_bits(output.detach(), layer(leaf).detach())
        output.sum().backward()
    assert graphs() == 1


def test_without_dynamic_shapes_every_size_is_a_graph():
    layer = Case("fp8-current").layer()
    assert_right_for(layer, compiled(layer, dynamic=False), COUNTS[:5])
    assert graphs() == 5


# Many layers.

MANY = 12


def different_layers(**options):
    return [
        fg.Linear(K + i, N + i, recipe=LOW_PRECISION[i % 3 + 1], dtype=torch.bfloat16, **options)
        for i in range(MANY)
    ]


def assert_each_right(layers, compile_one):
    for layer in layers:
        x, grad_output = batch(24, layer.in_features, layer.out_features)
        got = step(layer, x, grad_output, compile_one(layer))
        assert_same_results(got, step(layer, x, grad_output))


def test_many_layers_in_one_model():
    layers = [fg.Linear(K + i, K + i + 1, recipe=RECIPES[i % len(RECIPES)]) for i in range(MANY)]
    model = nn.Sequential(*layers)
    x, grad_output = batch(24, K, K + MANY, dtype=torch.float32)
    got = step(model, x, grad_output, compiled(model))
    assert_same_results(got, step(model, x, grad_output))
    assert graphs() == 1


def test_many_layers_compiled_one_by_one_share_a_limit():
    """Torch counts recompilations of a function, and all layers are one: `Linear.forward`. It is so for any class."""
    with pytest.raises(FailOnRecompileLimitHit, match="fullgraph=True"):
        assert_each_right(different_layers(), compiled)
    assert graphs() == torch._dynamo.config.recompile_limit


def has_option(name):
    return pytest.mark.skipif(
        name not in inspect.signature(torch.compile).parameters,
        reason=f"this torch.compile has no {name}",
    )


LIMITS = [
    pytest.param({"isolate_recompiles": True}, {}, MANY, marks=has_option("isolate_recompiles")),
    pytest.param({"recompile_limit": MANY}, {}, MANY, marks=has_option("recompile_limit")),
    pytest.param({}, {"recompile_limit": MANY}, MANY),
    # One graph for each recipe and one more for the sizes, whatever their number.
    pytest.param({}, {"force_parameter_static_shapes": False}, 6),
]


@pytest.mark.parametrize(("options", "config", "most"), LIMITS, ids=str)
def test_many_layers_compiled_one_by_one(options, config, most):
    with torch._dynamo.config.patch(**config):
        assert_each_right(different_layers(), lambda layer: compiled(layer, **options))
    assert graphs() <= most


def test_the_function_for_many_sizes_is_two_graphs():
    """Parameters of a module have constant sizes; arguments do not."""
    function = compiled(fg.linear)
    for i in range(MANY):
        x, weight = tensors((24, K + i), (N + i, K + i))
        assert_same_bits(
            function(x, weight, recipe="fp8-current"), fg.linear(x, weight, recipe="fp8-current")
        )
    assert graphs() == 2


# Equal blocks.


class Block(nn.Module):
    def __init__(self, recipe, width=K, **options):
        super().__init__()
        options = {"dtype": torch.bfloat16, "recipe": recipe, **options}
        self.up, self.down = fg.Linear(width, 64, **options), fg.Linear(64, width, **options)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class NestedBlock(Block):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return super().forward(x)


def train(model, steps=3):
    """Everything that some steps of training give."""
    results = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with same_random_numbers():
        for number in range(steps):
            optimizer.zero_grad()
            x, grad_output = batch(24, K, K)
            leaf = x.requires_grad_()
            output = model(leaf)
            output.backward(grad_output)
            found = {"output": output.detach(), "leaf": leaf.grad, **gradients(model)}
            for name, layer in model.named_modules():
                found |= {f"{name}.{key}": t for key, t in state_of(layer).items()}
            results |= {f"{number}.{name}": value.clone() for name, value in found.items()}
            optimizer.step()
            if any(isinstance(m, fg.Linear) and m.scaling_state.rule for m in model.modules()):
                fg.update_scales(model)
    return results


@recipes
def test_equal_blocks_compile_once_region_by_region(recipe):
    model = nn.Sequential(*[Block(recipe) for _ in range(4)])
    expected = train(copy.deepcopy(model))
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_same_results(train(model), expected)
    assert graphs() == 1


def test_blocks_of_two_kinds_are_two_graphs():
    kinds = {"recipe": "fp8-current"}, {"recipe": "fp8-delayed", "bias": False}
    model = nn.Sequential(*[Block(**kinds[i % 2]) for i in range(4)])
    expected = train(copy.deepcopy(model))
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    assert_same_results(train(model), expected)
    assert graphs() == 2


class Stack(nn.Module):
    """A model of one's own: torch does not compile the frame of an `nn.Sequential` that compiles itself."""

    def __init__(self, block, recipe, count, **options):
        super().__init__()
        self.blocks = nn.ModuleList([block(recipe, **options) for _ in range(count)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Regions:
    """A backend that counts the linear ops that are there to be compiled: a region that is called often counts once."""

    def __init__(self):
        self.ops = self.calls = 0

    def __call__(self, module, inputs):
        regions = set()
        for node in module.graph.nodes:
            self.calls += "invoke_subgraph" in str(node.target)
            self.ops += "fullgraph.linear" in str(node.target)
            if node.op == "get_attr" and node.target not in regions:
                regions.add(node.target)
                inner = getattr(module, node.target).graph.nodes
                self.ops += sum("fullgraph.linear" in str(n.target) for n in inner)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)


IN_REGIONS = ["bf16", "fp8-current", "fp8-per-row", "fp8-block", "mxfp8"]
"""The recipes whose ops change nothing."""


@pytest.mark.parametrize("recipe", IN_REGIONS)
def test_nested_regions_compile_once(recipe):
    """The first block, whose input needs no history, and one for all others."""
    model = Stack(NestedBlock, recipe, 5)
    expected = train(copy.deepcopy(model))
    regions = Regions()
    model.compile(backend=regions, fullgraph=True)
    assert_same_results(train(model), expected)
    assert regions.ops <= 4
    assert regions.calls >= 4
    assert graphs() == 1


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_nested_regions_infer(recipe):
    model = Stack(NestedBlock, recipe, 3)
    x, _ = batch(24)
    with torch.no_grad():
        assert_same_bits(compiled(model)(x), model(x))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("fp8-delayed", {}), ("nvfp4", {}), ("fp8-current", {"quantized_weight": True})],
    ids=["delayed", "nvfp4", "quantized weight"],
)
def test_what_nested_regions_cannot_hold_is_refused(recipe, options):
    """Torch has no regions with ops that change a list of tensors, nor with tensor subclasses."""
    model = Stack(NestedBlock, recipe, 3, **options)
    x, _ = batch(24)
    with pytest.raises(
        Exception, match="invoke_subgraph|subgraph_reuse|Expected FakeTensor|arg_val|functionaliz"
    ):
        compiled(model)(x.requires_grad_())


# Recipes that take turns.


def run_in(function, x, *names):
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(fg.autocast(name))
        return function(x)


def test_two_recipes_in_turn_are_two_graphs():
    layer = fg.Linear(K, N, dtype=torch.bfloat16)
    function = compiled(layer)
    for number in range(6):
        x, grad_output = batch(24)
        name = ("fp8-current", "mxfp8")[number % 2]
        got = step(layer, x, grad_output, lambda x, name=name: run_in(function, x, name))
        expected = step(layer, x, grad_output, lambda x, name=name: run_in(layer, x, name))
        assert_same_results(got, expected)
    assert graphs() == 2
    x, _ = batch(24)
    run_in(function, x, fg.recipes.Float8CurrentScaling())  # another object, the same recipe
    run_in(function, x, "bf16", "nvfp4", "mxfp8")  # deeper
    assert graphs() <= 4  # without requires_grad of the input
    before = graphs()
    run_in(function, x, fg.recipes.Float8CurrentScaling())
    run_in(function, x, "mxfp8")
    assert graphs() == before


def test_an_autocast_inside_needs_no_second_graph():
    layer = fg.Linear(K, N, dtype=torch.bfloat16)

    def both(x):
        return run_in(layer, x, "fp8-current") + run_in(layer, x, "mxfp8")

    x, grad_output = batch(24)
    function = compiled(both)
    for _ in range(3):
        assert_same_results(
            step(layer, x, grad_output, function), step(layer, x, grad_output, both)
        )
    assert graphs() == 1


def test_a_layer_that_is_given_another_recipe():
    layer = fg.Linear(K, N, dtype=torch.bfloat16, recipe="fp8-current")
    function = compiled(layer)
    for name in ("fp8-current", "fp8-delayed", "fp8-current", "fp8-delayed", "mxfp8"):
        layer.configure(name)
        x, grad_output = batch(24)
        assert_same_results(step(layer, x, grad_output, function), step(layer, x, grad_output))
    assert graphs() == 3


# Train, eval and the modes of torch.

CONTEXTS = (contextlib.nullcontext, torch.no_grad, torch.inference_mode)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed", "nvfp4"])
def test_switches_of_training_are_a_few_graphs(recipe):
    """One for each of gradients, no_grad and inference_mode, twice where the input requires a gradient in turn."""
    layer = Case(recipe).layer()
    function = compiled(layer)
    for _ in range(2):
        for context in CONTEXTS:
            for training in (True, False):
                for requires_grad in (True, False):
                    layer.train(training)
                    x, _ = batch(24)
                    with context():
                        output = function(x.requires_grad_(requires_grad))
                        assert_same_bits(output.clone().detach(), layer(x).clone().detach())
    assert graphs() == 6


def test_resetting_compiles_again_to_the_same():
    layer = Case("fp8-delayed").layer()
    x, grad_output = batch(24)
    function = compiled(layer)
    before = step(layer, x, grad_output, function)
    torch.compiler.reset()
    assert_same_results(step(layer, x, grad_output, function), before)
    assert graphs() == 2


def test_stances():
    layer = Case("fp8-delayed").layer()
    (x, grad_output), (other, _) = batch(24), batch(7)
    function = compiled(layer)
    with torch.compiler.set_stance("force_eager"):
        expected = step(layer, x, grad_output, function)
    assert graphs() == 0
    assert_same_results(step(layer, x, grad_output, function), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same_results(step(layer, x, grad_output, function), expected)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            function(other)
    with torch.compiler.set_stance("eager_on_recompile"):
        assert_same_bits(function(other).detach(), layer(other).detach())
    assert graphs() == 1


WAYS = {
    "eager": {"backend": "eager"},
    "aot_eager_decomp_partition": {"backend": "aot_eager_decomp_partition"},
    "options": {"backend": "inductor", "options": {"epilogue_fusion": False}},
    "max-autotune": {"backend": "inductor", "mode": "max-autotune-no-cudagraphs"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_other_ways_of_compiling(recipe, way):
    model = Stack(Block, recipe, 1)
    expected = train(copy.deepcopy(model))
    model.compile(fullgraph=True, **WAYS[way])
    assert_same_results(train(model), expected)
    assert graphs() == 1


# Who is at fault.


def scaled(x, factor=2, items=(), *, offset=0.0, options=None):
    return x * factor + offset + sum(items) + (options or {}).get("a", 0)


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.repeats = 1
        self.inner = fg.Linear(8, 8, recipe="fp8-current")

    def forward(self, x):
        for _ in range(self.repeats):
            x = self.inner(x)
        return x


@contextlib.contextmanager
def doing(action):
    action()
    yield


def q(x, quantizer=E4M3):
    return fg.quantize(x, quantizer, fg.BOTH)


x = torch.randn(4, 8)
call = testing.call
AT_FAULT = {
    "dtype": (call(x), call(x.double()), r"x.dtype was float32, is float64"),
    "shape": (call(x), call(x[:3]), r"x.shape\[0\] was 4, is 3"),
    "rank": (call(x), call(x[None]), r"x.ndim was 2, is 3"),
    "stride": (call(x), call(torch.randn(8, 4).t()), r"x.stride\(\)\[0\] was 8, is 1"),
    "requires_grad": (
        call(x),
        call(x.clone().requires_grad_()),
        r"x.requires_grad was False, is True",
    ),
    "integer": (call(x, 2), call(x, 3), r"factor was 2, is 3"),
    "float": (call(x, 2.0), call(x, 2.5), r"factor was 2.0, is 2.5"),
    "bool": (call(x, True), call(x, False), r"factor was True, is False"),
    "length of a list": (call(x, 1, [1]), call(x, 1, [1, 2]), r"len\(items\) was 1, is 2"),
    "item of a list": (
        call(x, 1, [x + 1]),
        call(x, 1, [(x + 1).double()]),
        r"items\[0\].dtype was float32, is float64",
    ),
    "keyword": (call(x, offset=1.0), call(x, offset=2.0), r"offset was 1.0, is 2.0"),
    "new keyword": (call(x), call(x, offset=2.0), r"offset was not passed before"),
    "item of a dict": (
        call(x, options={"a": 1}),
        call(x, options={"a": 2}),
        r"options\['a'\] was 1, is 2",
    ),
    "one tensor twice": (
        call(x, 1, [x + 1]),
        call(x, 1, [x]),
        r"x and items\[0\] are one tensor now",
    ),
    "no_grad": (call(x), call(x).inside(torch.no_grad()), r"gradients were switched"),
    "autocast": (
        call(x),
        call(x).inside(torch.autocast("cpu", torch.bfloat16)),
        r"torch.autocast was switched",
    ),
}


@pytest.mark.parametrize(("before", "after", "message"), AT_FAULT.values(), ids=AT_FAULT)
def test_the_argument_at_fault_is_named(before, after, message):
    testing.assert_compiles_once(scaled, before, before)
    with pytest.raises(AssertionError, match=f"scaled: call 3 recompiles because {message}"):
        testing.assert_compiles_once(scaled, before, before, after)


LAYERS_AT_FAULT = {
    "attribute": (
        call(x),
        lambda model: call(x).inside(doing(lambda: setattr(model, "repeats", 2))),
        r"self.repeats was 1, is 2",
    ),
    "recipe": (
        call(x),
        lambda model: call(x).inside(doing(lambda: model.inner.configure("mxfp8"))),
        r"the type of self.inner.recipe was Float8CurrentScaling, is MXFP8BlockScaling",
    ),
    "option of the recipe": (
        call(x),
        lambda model: call(x).inside(
            doing(
                lambda: model.inner.configure(fg.recipes.Float8CurrentScaling(power_of_two=True))
            )
        ),
        r"self.inner.recipe",
    ),
    "autocast": (
        call(x),
        lambda model: call(x).inside(
            doing(lambda: model.inner.configure(None)), fg.autocast("mxfp8")
        ),
        r"the type of self.inner.recipe was Float8CurrentScaling, is NoneType",
    ),
    "size of a parameter": (
        call(x),
        lambda model: call(x).inside(
            doing(lambda: setattr(model.inner, "bias", nn.Parameter(torch.ones(1))))
        ),
        r"self.inner.bias.shape\[0\] was 8, is 1",
    ),
    "quantizer": (call(q(x)), lambda model: call(q(x, E5M2)), r"another kind of structured tensor in x"),
    "quantized or not": (call(q(x)), lambda model: call(x), r"the type of x was QuantizedTensor, is Tensor"),
    "size": (call(q(x)), lambda model: call(q(x[:3])), r"x.shape\[0\] was 4, is 3"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "message"), LAYERS_AT_FAULT.values(), ids=LAYERS_AT_FAULT
)
def test_what_of_the_model_is_at_fault_is_named(before, after, message):
    model = Switched()
    with pytest.raises(AssertionError, match=f"Switched: call 2 recompiles because {message}"):
        testing.assert_compiles_once(model, before, after(model))


def test_the_recipe_of_an_autocast_is_named():
    layer = fg.Linear(8, 8)
    message = r"the type of the recipe of the enclosing fg.autocast was Float8CurrentScaling"
    with pytest.raises(AssertionError, match=message):
        testing.assert_compiles_once(
            layer,
            call(x).inside(fg.autocast("fp8-current")),
            call(x).inside(fg.autocast("mxfp8")),
        )
    with pytest.raises(AssertionError, match="the recipe of the enclosing fg.autocast was None"):
        testing.assert_compiles_once(layer, call(x), call(x).inside(fg.autocast("mxfp8")))


def test_what_is_captured_is_named():
    captured = [2]

    def function(x):
        return x * captured[0]

    with pytest.raises(AssertionError, match=r"because captured\[0\] was 2, is 3"):
        testing.assert_compiles_once(
            function, call(x), call(x).inside(doing(lambda: captured.__setitem__(0, 3)))
        )


def test_a_size_of_one_is_named():
    message = r"x.shape\[0\] is 0 or 1, and torch compiles for these sizes apart"
    with pytest.raises(AssertionError, match=message):
        testing.assert_compiles_once(scaled, (x,), (x[:1],), dynamic=True)
