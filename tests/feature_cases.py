"""Every training feature as one declaration, and how a combination of them is trained, compiled and compared.

A case is a set of features and a recipe. It is trained for a few steps; outputs, gradients, weights and scales of each
step must be those of eager mode, bit for bit, in the number of graphs and nodes that the features add up to. To add a
feature, write one function below `FEATURES`; to add a recipe, one line in `RECIPES`.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullgraph as fg
from fullgraph.customop.deferred import count
from fullgraph.customop.graphs import GraphRecorder
from fullgraph.recipes import CustomRecipe, Role
from linear_cases import E4M3, assert_same_results, bytes_of, same_random_numbers, state_of

WIDTH, RANK, STEPS, RATE = 32, 8, 4, 0.125
TORCH = tuple([int(part) for part in torch.__version__.split(".")[:2]])


def _mixed(role):
    """Quantizers that no named recipe combines: rows by tensors forward, blocks backward, the output by rows."""
    if role.tensor is Role.WEIGHT:
        return fg.HybridQuantizer(E4M3, fg.MXQuantizer())
    if role.tensor is Role.INPUT:
        return fg.HybridQuantizer(fg.PerRowQuantizer(), fg.BlockQuantizer())
    return fg.MXQuantizer() if role.tensor is Role.GRAD_OUTPUT else fg.PerRowQuantizer()


RECIPES = {name: fg.recipes.get(name) for name in fg.recipes.BY_NAME} | {
    "custom": CustomRecipe(_mixed)
}
"""Every recipe, by the name of its column."""


# What a case is made of.


@dataclasses.dataclass
class Setup:
    """How a case trains. The defaults are the plain way; each feature changes some of it."""

    recipe: Any
    device: str = "cpu"
    layer: dict[str, Any] = dataclasses.field(default_factory=dict)  # options of every fg.Linear
    dtype: torch.dtype = torch.bfloat16
    recipe_by: tuple[str, ...] = ()  # "inside" and "outside": an autocast there, not the layer
    torch_autocast: bool = False
    checkpointing: str = ""  # "all" or "selective"
    quantized_joint: bool = False  # between the second and the third layer
    quantized_input: bool = False
    frozen_input: bool = False
    frozen_weight: bool = False  # of the second layer
    tied: bool = False  # second and third layer
    adapter: bool = False  # around the first layer, which is frozen
    leading: int = 1  # 2: a 3-D input
    tokens: tuple[int, ...] = (24,)  # step by step, in turn
    in_flight: int = 1
    rounds: int = 1
    hooks: bool = False  # on saved tensors
    evaluates: bool = False
    eager_step: int = -1
    copies_after: int = -1
    attaches: bool = False
    whole: bool = False
    first_microbatch: bool = False
    main_grad: torch.dtype | None = None
    statistics: bool = False
    keeps_gradients: bool = False  # cleared in place, as CUDA graphs want it that add to them


@dataclasses.dataclass(frozen=True)
class Never:
    """A combination that is not to be had, with the reason.

    Args:
        reason: in words, for the documentation.
        recipe: recipes that are meant; all by default.
        features: only together with these.
        error: what running it raises; "" where two features ask for different values of one thing.
        torch: in which versions of torch, from the first to before the second.
    """

    reason: str
    recipe: Callable[[Any], bool] = lambda recipe: True
    features: tuple[str, ...] = ()
    error: str = ""
    torch: tuple[tuple[int, int], tuple[int, int]] = ((2, 11), (3, 0))

    def forbids(self, recipe: str, features: Sequence[str]) -> bool:
        """Whether it is about this combination, in this version of torch."""
        first, after = self.torch
        together = set(self.features) <= set(features)
        return together and first <= TORCH < after and self.recipe(RECIPES[recipe])


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature.

    Args:
        name: in words.
        change: what it does to a `Setup`.
        same_as: features of the training that has the same bits; None if it has bits of its own.
        own_bits_with: features together with which it has bits of its own after all.
        rounds: why Inductor gives other bits than eager mode, if something of torch's own is in the graph.
        never: combinations that are not to be had.
    """

    name: str
    change: Callable[[Setup], None]
    same_as: tuple[str, ...] | None = None
    own_bits_with: tuple[str, ...] = ()
    rounds: str = ""
    never: tuple[Never, ...] = ()


FEATURES: dict[str, Feature] = {}


def feature(name: str, *never: Never, **facts: Any) -> Any:
    """Declare a feature; the decorated function changes a `Setup`."""

    def declare(change: Callable[[Setup], None]) -> Callable[[Setup], None]:
        FEATURES[name] = Feature(name, change, never=never, **facts)
        return change

    return declare


ONE_DTYPE = "a parameter has one dtype"
NO_SCALES = Never(
    "there are no scales to update",
    recipe=lambda recipe: not recipe.scaling_rule_text,
    error="no layer of .* has delayed scaling",
)


MICROBATCHES = ("two microbatches in flight", "gradient accumulation", "is_first_microbatch")


@feature("no bias")
def _(setup):
    setup.layer["bias"] = False


@feature("return_bias", rounds="the gradient of the bias is torch's sum, in another order")
def _(setup):
    setup.layer["return_bias"] = True


@feature("quantized weight")
def _(setup):
    setup.layer["quantized_weight"] = True


@feature("quantized input")
def _(setup):
    setup.quantized_input = True


@feature("quantized activation between layers")
def _(setup):
    setup.quantized_joint = True


@feature("frozen weight")
def _(setup):
    setup.frozen_weight = True


@feature("frozen input")
def _(setup):
    setup.frozen_input = True


@feature("tied weights")
def _(setup):
    setup.tied = True


@feature("LoRA adapter, frozen quantized base")
def _(setup):
    setup.adapter = True


@feature("float32 parameters")
def _(setup):
    setup.dtype = torch.float32


@feature("float16 parameters", Never(ONE_DTYPE, features=("float32 parameters",)))
def _(setup):
    setup.dtype = torch.float16


@feature("torch.autocast, float32 parameters", Never(ONE_DTYPE, features=("float16 parameters",)))
def _(setup):
    setup.dtype, setup.torch_autocast = torch.float32, True


@feature("fg.autocast outside of the graph")
def _(setup):
    setup.recipe_by += ("outside",)


@feature("fg.autocast inside of the graph")
def _(setup):
    setup.recipe_by += ("inside",)


@feature("3-D input")
def _(setup):
    setup.leading = 2


@feature("dynamic shapes, 3 token counts")
def _(setup):
    setup.tokens = (24, 14, 40)


@feature("two microbatches in flight")
def _(setup):
    setup.in_flight = 2


@feature("gradient accumulation")
def _(setup):
    setup.rounds = 2


@feature("is_first_microbatch", same_as=("gradient accumulation",))
def _(setup):
    setup.rounds, setup.first_microbatch = 2, True


@feature("main_grad, float32")
def _(setup):
    setup.main_grad = torch.float32
    setup.layer["wgrad"] = dataclasses.replace(wgrad_of(setup), into_main_grad=True)


@feature("main_grad, bfloat16", Never("there is one main_grad", features=("main_grad, float32",)))
def _(setup):
    setup.main_grad = torch.bfloat16
    setup.layer["wgrad"] = dataclasses.replace(wgrad_of(setup), into_main_grad=True)


@feature("main_grad with a placeholder")
def _(setup):
    setup.main_grad = setup.main_grad or torch.float32
    wgrad = dataclasses.replace(wgrad_of(setup), into_main_grad=True, placeholder_grad=True)
    setup.layer["wgrad"] = wgrad


@feature(
    "deferred wgrad",
    same_as=(),
    own_bits_with=("tied weights",),  # autograd adds up the two gradients of a backward pass first
)
def _(setup):
    setup.layer["wgrad"] = dataclasses.replace(wgrad_of(setup), deferred=True)


@feature("save_input, save_weight: ORIGINAL", same_as=())
def _(setup):
    setup.layer |= {"save_input": fg.Save.ORIGINAL, "save_weight": fg.Save.ORIGINAL}


@feature("activation checkpointing", same_as=())
def _(setup):
    setup.checkpointing = "all"


@feature(
    "selective checkpointing",
    Never("one region has one policy", features=("activation checkpointing",)),
    same_as=(),
)
def _(setup):
    setup.checkpointing = "selective"


@feature("saved-tensor hooks, offload", same_as=())
def _(setup):
    setup.hooks = True


@feature("no_grad evaluation between steps")
def _(setup):
    setup.evaluates = True


@feature("an eager step in between", same_as=())
def _(setup):
    setup.eager_step = 2


@feature("deepcopy in the middle", same_as=())
def _(setup):
    setup.copies_after = 0


@feature("statistics of every step", same_as=())
def _(setup):
    setup.statistics = True


@feature("fg.attach to the optimizer", NO_SCALES, same_as=())
def _(setup):
    setup.attaches = True


@feature(
    "whole step in one graph",
    Never(
        "torch breaks the graph at optimizer.step(), whose hook it is",
        features=("fg.attach to the optimizer",),
        error=r"torch\._dynamo\.graph_break\(\)",
    ),
    Never(
        "there is no later in one graph: use main_grad, or no option",
        features=("deferred wgrad",),
        error=r"of a deferred gradient|output\.backward",
    ),
    *[
        Never(
            "torch recomputes for one backward pass in a graph",
            features=(checkpointing, microbatches),
            error="disjoint backward regions that require recomputation",
            torch=((2, 12), (3, 0)),
        )
        for checkpointing in ("activation checkpointing", "selective checkpointing")
        for microbatches in MICROBATCHES
    ],
    *[
        Never(
            "torch 2.11 does not differentiate by a quantized tensor in a graph",
            features=(quantized,),
            error=r"output\.backward",
            torch=((2, 11), (2, 12)),
        )
        for quantized in ("quantized weight", "quantized input")
    ],
    same_as=(),
)
def _(setup):
    setup.whole = True


def wgrad_of(setup: Setup) -> Any:
    """What the features so far want of weight gradients."""
    return setup.layer.get("wgrad", fg.Wgrad())


@dataclasses.dataclass(frozen=True)
class FeatureCase:
    """A recipe and some features, by name, in the order of `FEATURES`."""

    recipe: str
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " + ".join([self.recipe, *self.features])

    @property
    def sorted(self) -> "FeatureCase":
        """The same in the order of `FEATURES`."""
        return FeatureCase(self.recipe, tuple([f for f in FEATURES if f in self.features]))

    def setup(self, device: str = "cpu") -> Setup:
        """How it trains."""
        setup = Setup(RECIPES[self.recipe], device)
        for name in self.sorted.features:
            FEATURES[name].change(setup)
        return setup

    @property
    def plain(self) -> "FeatureCase":
        """The case with the same bits and none of the features that do not change them."""
        same = []
        for name in self.features:
            feature = FEATURES[name]
            own = feature.same_as is None or set(feature.own_bits_with) & set(self.features)
            same += [name] if own else feature.same_as
        return FeatureCase(self.recipe, tuple(same)).sorted

    @property
    def rounds(self) -> str:
        """Why Inductor rounds otherwise, "" if it does not."""
        return "; ".join([r for f in self.features if (r := FEATURES[f].rounds)])

    @property
    def excluded(self) -> Never | None:
        """Why it is not to be had, if so."""
        rules = [never for name in self.features for never in FEATURES[name].never]
        found = [never for never in rules if never.forbids(self.recipe, self.features)]
        return found[0] if found else None


# How a case trains.


class Adapted(nn.Module):
    """A frozen quantized layer and a trained detour of low rank around it."""

    def __init__(self, setup, make):
        super().__init__()
        self.base = make(WIDTH, WIDTH, quantized_weight=True).requires_grad_(False)
        self.down, self.up = make(WIDTH, RANK, bias=False), make(RANK, WIDTH, bias=False)

    def forward(self, x, **options):
        around = apply(self.up, apply(self.down, x, **options), **options)
        return apply(self.base, x, **options) + around


def apply(layer, x, **options):
    """The output with its bias, wherever that is added."""
    output = layer(x, **options)
    if not isinstance(output, tuple):
        return output
    output, bias = output
    return output if bias is None else output + bias


class Model(nn.Module):
    """Three layers; an activation after the first, bytes or not after the second."""

    def __init__(self, setup):
        super().__init__()
        recipe = None if setup.recipe_by else setup.recipe

        def make(in_features, out_features, **options):
            options = {**setup.layer, **options, "dtype": setup.dtype, "recipe": recipe}
            return fg.Linear(in_features, out_features, **options)

        first = Adapted(setup, make) if setup.adapter else make(WIDTH, WIDTH)
        self.layers = nn.ModuleList([first, make(WIDTH, WIDTH), make(WIDTH, WIDTH)])
        self.joint = {"quantized_output": True} if setup.quantized_joint else {}
        self.checkpointing = setup.checkpointing
        if setup.tied:
            self.layers[2].weight = self.layers[1].weight
        if setup.frozen_weight:
            self.layers[1].weight.requires_grad_(False)
        self.to(setup.device)

    def forward(self, x, is_first=None):
        if not self.checkpointing:
            return self.body(x, is_first)
        selective = self.checkpointing == "selective"
        options = {"context_fn": fg.save_linears} if selective else {}
        return checkpoint(self.body, x, is_first, use_reentrant=False, **options)

    def body(self, x, is_first):
        options = {} if is_first is None else {"is_first_microbatch": is_first}
        first, second, third = self.layers
        x = apply(first, x, **options).relu()
        return apply(third, apply(second, x, **self.joint, **options), **options)

    @property
    def linears(self):
        """Its linear layers."""
        return [layer for layer in self.modules() if isinstance(layer, fg.Linear)]

    @property
    def trained(self):
        """Its parameters that are trained, by name."""
        return {n: p for n, p in self.named_parameters() if p.requires_grad}


class Training:
    """A model in training.

    Args:
        setup: how.
        compile: what `torch.compile` is to do; called for each function that a case compiles.
        model: one that trains already.
    """

    def __init__(self, setup, compile, model=None):
        self.setup, self.compile = setup, compile
        torch.manual_seed(1)
        self.model = Model(setup) if model is None else model
        self.optimizer = torch.optim.SGD(self.model.trained.values(), lr=RATE)
        if setup.main_grad is not None:
            for layer in self.model.linears:
                weight = layer.weight
                weight.main_grad = torch.zeros(
                    weight.shape, dtype=setup.main_grad, device=weight.device
                )
                torch._dynamo.mark_static_address(weight.main_grad)
        self.statistics = fg.collect_statistics(self.model, every=1) if setup.statistics else None
        self.updates = bool(setup.recipe.scaling_rule_text)
        if setup.attaches:
            fg.attach(self.optimizer, self.model)
        if setup.whole and self.updates and setup.recipe_by:
            with fg.autocast(setup.recipe):  # before a graph holds it the layers must know the rule
                fg.update_scales(self.model)
        dynamic = True if len(setup.tokens) > 1 else None
        self.forward = compile(self._forward, dynamic=dynamic)
        self.whole = compile(self._whole, dynamic=dynamic)

    def _forward(self, x, is_first=None):
        if "inside" not in self.setup.recipe_by:
            return self.model(x, is_first)
        with fg.autocast(self.setup.recipe):
            return self.model(x, is_first)

    def _deferred(self):
        """Compute what backward passes have left, oldest first, once all microbatches are through."""
        for layer in self.model.linears:
            while layer.deferred_wgrad is not None and count(layer.deferred_wgrad):
                layer.backward_dw()

    def _passes(self, forward, inputs, grad_outputs):
        """All microbatches, those in flight together forward before any of them backward."""
        outputs, group = [], self.setup.in_flight
        for start in range(0, len(inputs), group):
            part = range(start, start + group)
            flying = []
            for i in part:
                is_first = {"is_first": i == 0} if self.setup.first_microbatch else {}
                flying.append(forward(inputs[i], **is_first))
            outputs += [output.detach().clone() for output in flying]
            for output, i in zip(flying, part, strict=True):
                output.backward(grad_outputs[i])
        self._deferred()
        return outputs

    def _whole(self, inputs, grad_outputs):
        outputs = self._passes(self._forward, inputs, grad_outputs)
        if self.setup.attaches:
            self.optimizer.step()
        with torch.no_grad():
            for parameter in self.model.trained.values():
                grad = self._grad(parameter)
                if grad is not None:
                    parameter.sub_(grad, alpha=RATE)
        if self.updates:
            fg.update_scales(self.model)
        return outputs

    def _clear(self):
        """Gradients of the step before go."""
        self.model.zero_grad(set_to_none=not self.setup.keeps_gradients)
        for parameter in self.model.trained.values():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
            if self.setup.keeps_gradients and parameter.grad is None:
                shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
                parameter.grad = torch.zeros(shape, dtype=dtype, device=device)
                torch._dynamo.mark_static_address(parameter.grad)

    def _grad(self, parameter):
        """What the optimizer sees."""
        main_grad = getattr(parameter, "main_grad", None)
        return parameter.grad if main_grad is None else main_grad.to(parameter.dtype)

    @contextlib.contextmanager
    def _outside(self):
        """What is entered around the compiled function."""
        setup = self.setup
        with contextlib.ExitStack() as stack:
            if "outside" in setup.recipe_by:
                stack.enter_context(fg.autocast(setup.recipe))
            if setup.torch_autocast:
                stack.enter_context(torch.autocast(setup.device, torch.bfloat16))
            if setup.hooks:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_moved, _moved))
            yield

    def input(self, x):
        """A leaf of the graph."""
        setup = self.setup
        if setup.quantized_input:
            own = setup.recipe.quantizer(Role.INPUT)
            x = fg.quantize(x, E4M3 if own is None or own.is_delayed else own, fg.BOTH)
        return x.requires_grad_(not setup.frozen_input)

    def data(self, number):
        """Inputs and gradients of the outputs of a step; they grow and shrink, so that scales matter."""
        setup = self.setup
        generator = torch.Generator().manual_seed(number)
        tokens = setup.tokens[number % len(setup.tokens)]
        leading = (tokens,) if setup.leading == 1 else (2, tokens // 2)
        shape = (setup.in_flight * setup.rounds, *leading, WIDTH)
        factor = 2.0 ** (number % 3)
        x, grad_output = [
            (torch.randn(shape, generator=generator) * f).to(setup.device)
            for f in (factor, 1e-2 / factor)
        ]
        grad_dtype = torch.bfloat16 if setup.torch_autocast else setup.dtype
        return list(x.to(setup.dtype).unbind()), list(grad_output.to(grad_dtype).unbind())

    def step(self, number):
        """One step: everything that came of it, by name."""
        setup, model = self.setup, self.model
        xs, grad_outputs = self.data(number)
        inputs = [self.input(x.clone()) for x in xs]
        eager = number == setup.eager_step
        model.train()
        self._clear()
        with same_random_numbers():
            if setup.whole:
                with self._outside(), torch._dynamo.config.patch(trace_autograd_ops=True):
                    outputs = (self._whole if eager else self.whole)(inputs, grad_outputs)
            else:
                forward = self._forward if eager else self.forward
                outputs = self._passes(self._in_contexts(forward), inputs, grad_outputs)
        results = self._results(inputs, outputs)
        if not setup.whole:
            self._update()
        if self.statistics is not None:
            self.statistics.step()
        for name, parameter in model.named_parameters():
            results |= bytes_of(parameter.detach(), name)
        if setup.evaluates:
            model.eval()
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad(), self._outside():
                results["evaluation"] = self.forward(xs[0]).clone()
        for name, layer in model.named_modules():
            results |= {f"{name}.{key}": value for key, value in state_of(layer).items()}
        if number == setup.copies_after:
            after = Training(setup, self.compile, copy.deepcopy(model))
            self.model, self.optimizer = after.model, after.optimizer
            self.statistics = after.statistics
            self.forward, self.whole = after.forward, after.whole
        return results

    def _in_contexts(self, forward):
        def run(x, **options):
            with self._outside():
                return forward(x, **options)

        return run

    def _results(self, inputs, outputs):
        results = {f"output{i}": output.clone() for i, output in enumerate(outputs)}
        if not self.setup.frozen_input:
            results |= {f"grad of input{i}": x.grad.clone() for i, x in enumerate(inputs)}
        for name, parameter in self.model.trained.items():
            results[f"grad of {name}"] = self._grad(parameter).clone()
        return results

    def _update(self):
        for parameter in self.model.trained.values():
            if hasattr(parameter, "main_grad"):
                parameter.grad = self._grad(parameter)
        self.optimizer.step()
        if self.updates and not self.setup.attaches:
            fg.update_scales(self.model)


def _moved(tensor):
    """A saved tensor on its way out of the device, or back."""
    return tensor.clone()


def not_compiled(function, **options):
    """Eager mode, in place of `torch.compile`."""
    return function


def train(setup, compile=not_compiled, steps=STEPS):
    """Train a setup; for each step everything that came of it."""
    training = Training(setup, compile)
    return [training.step(number) for number in range(steps)]


def assert_same_record(actual, expected):
    """Every step has the same results, bit for bit."""
    for i, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        try:
            assert_same_results(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"step {i}: {error}") from None


# Which cases there are.


SINGLES = [FeatureCase(recipe, (name,)) for name in FEATURES for recipe in RECIPES]
"""Every feature with every recipe, excluded ones too."""

PAIRS = [
    FeatureCase(list(RECIPES)[number % len(RECIPES)], pair)
    for number, pair in enumerate(itertools.combinations(FEATURES, 2))
]
"""Every pair of features, the recipes in turn."""


def possible(recipe, features):
    """Whether a combination is to be had."""
    return FeatureCase(recipe, tuple(features)).excluded is None


def covering(size):
    """Cases of several features, so that every pair of features that is possible is in one, with recipes in turn.

    Greedy: a case begins with a pair that no earlier one has, and takes the feature that brings most such pairs until
    none brings any.

    Args:
        size: features of a case, at most.
    """
    wanted = {
        p for p in itertools.combinations(FEATURES, 2) if any(possible(r, p) for r in RECIPES)
    }
    cases: list[FeatureCase] = []
    recipes = itertools.cycle(RECIPES)
    while wanted:
        recipe = next(recipes)
        chosen = next((set(pair) for pair in sorted(wanted) if possible(recipe, pair)), set())
        while chosen and len(chosen) < size:
            gains = {
                name: sum(tuple(sorted((name, other), key=_place)) in wanted for other in chosen)
                for name in FEATURES
                if name not in chosen and possible(recipe, [*chosen, name])
            }
            best = max(gains, key=lambda name: gains[name], default="")
            if not gains.get(best):
                break
            chosen.add(best)
        if chosen:
            cases.append(FeatureCase(recipe, tuple(chosen)).sorted)
            wanted -= set(itertools.combinations(cases[-1].features, 2))
    return cases


def _place(name):
    return list(FEATURES).index(name)


# How a case is compiled, and what must come of it.


class Recorded:
    """`torch.compile` with a recorder for each function; for the modes of the CPU."""

    def __init__(self, compiler):
        self.compiler, self.recorders = compiler, []

    def __call__(self, function, **options):
        recorder = GraphRecorder(self.compiler)
        self.recorders.append(recorder)
        return torch.compile(function, fullgraph=True, backend=recorder, **options)

    @property
    def graphs(self):
        """All that were compiled, in order."""
        return [graph for recorder in self.recorders for graph in recorder.graphs]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Graphs, op nodes and backward GEMMs of all that a case compiles."""

    graphs: int
    forward: int
    backward: int
    dgrads: int
    wgrads: int


RECOMPUTES_NOT = TORCH < (2, 12)
"""A whole step in torch 2.11 keeps everything, checkpointing or not."""


def models_of(setup):
    """How many models are compiled."""
    return 1 if setup.copies_after < 0 else 2


def training_graphs(setup):
    """How many graphs train, and how many microbatches are in all of them together.

    One, or one for the first microbatch and one for the others; a whole step holds all of them.
    """
    graphs = models_of(setup) * (2 if setup.first_microbatch and not setup.whole else 1)
    return graphs, graphs * (setup.in_flight * setup.rounds if setup.whole else 1)


def expected_counts(setup):
    """What the features add up to: from what the model is, not from what the library does."""
    model = Model(setup)
    layers, first = model.linears, model.layers[0]
    reads_input = {first.base, first.down} if setup.adapter else {first}
    dgrads = [layer not in reads_input or not setup.frozen_input for layer in layers]
    wgrads = [layer.weight.requires_grad for layer in layers]
    biases = [
        layer.bias is not None and layer.bias.requires_grad and not layer.return_bias
        for layer in layers
    ]
    backward = sum([any(needs) for needs in zip(dgrads, wgrads, biases, strict=True)])
    training, times = training_graphs(setup)
    evaluations = models_of(setup) if setup.evaluates else 0
    return Counts(
        graphs=training + evaluations,
        forward=(times + evaluations) * len(layers),
        backward=times * backward,
        dgrads=times * sum(dgrads),
        wgrads=0 if wgrad_of(setup).deferred else times * sum(wgrads),
    )


def assert_expected(setup, graphs):
    """The graphs, nodes and GEMMs are those that the features add up to; nothing is computed that nobody needs."""
    expected = expected_counts(setup)
    forward, backward, recomputed = [
        [node for graph in graphs for node in getattr(graph, kind)]
        for kind in ("forward", "backward", "recomputed")
    ]
    gemms = [
        name
        for node in backward
        for name in node.plan.decisions.gemms
        if not (name == "wgrad" and node.plan.deferred)
    ]
    if setup.whole:  # one graph: what is recomputed is among the rest
        forward, recomputed = forward[: expected.forward], forward[expected.forward :]
    found = Counts(
        len(graphs), len(forward), len(backward), gemms.count("dgrad"), gemms.count("wgrad")
    )
    assert found == expected, f"{found} is not {expected}"
    # A last layer that saves nothing of its own need not run again; nor need others that no frozen weight asks for.
    layers, (_, times) = len(Model(setup).linears), training_graphs(setup)
    recomputes = setup.checkpointing == "all" and not (setup.whole and RECOMPUTES_NOT)
    most = times * layers if recomputes else 0
    assert len(recomputed) <= most
    if most and not setup.frozen_weight:
        assert len(recomputed) >= most - times


MODES = ("aot_eager", "inductor")
"""How a case is compiled on a CPU."""


@functools.cache
def expected_record(case, device="cpu"):
    """What eager training does without the features that do not change it."""
    return train(case.plain.setup(device))


def check(case, mode, device="cpu"):
    """Train a case eagerly and compiled, and compare everything.

    Args:
        case: not an excluded one.
        mode: of `MODES`.
        device: of the model.
    """
    setup = case.setup(device)
    expected = expected_record(case, device)
    eager, compiled = Training(setup, not_compiled), Recorded(mode)
    assert_same_record([eager.step(number) for number in range(STEPS)], expected)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        training = Training(setup, compiled)
        record = []
        for number in range(STEPS):
            record.append(training.step(number))
            if number == 1:
                made = len(compiled.graphs)
    if mode == "inductor" and case.rounds:
        assert_near(record, expected)
    else:
        assert_same_record(record, expected)
    if setup.statistics and setup.checkpointing != "all":  # what runs again is counted again
        assert list(training.statistics.records) == list(eager.statistics.records)
    assert len(compiled.graphs) == made
    assert_expected(setup, compiled.graphs)


def assert_near(actual, expected, limit=0.02):
    """The same names; the first step is near, before differences grow."""
    ours, theirs = actual[0], expected[0]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if value.is_floating_point() and name.startswith(("grad", "output")):
            distance = (ours[name].float() - value.float()).norm()
            assert distance <= limit * value.float().norm(), name
