"""What a process compiles when it starts: a table of uses of the layer, each trained and evaluated once.

    python warm_start.py [--load FILE] [--save FILE] [USE ...]

Prints one line of JSON: for each use and mode a digest of the results and how often torch's caches hit, missed and were
bypassed. `--save` and `--load` move the caches as one file.
"""

import hashlib
import json
import pathlib
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fullgraph as fg
from linear_cases import RECIPES, bytes_of, gradients, state_of, tensors

K = 48


def layer(features, **options):
    """Every use has its own sizes, so that none finds what another one left."""
    return fg.Linear(K, features, **{"dtype": torch.bfloat16, "recipe": "fp8-current", **options})


def between_layers(model):
    return lambda x: model[1](model[0](x, quantized_output=True))


def out_of_the_graph(model):
    return lambda x: model(x, quantized_output=True)


def autocast_inside(model):
    def run(x):
        with fg.autocast(fg.recipes.Float8CurrentScaling(power_of_two=True)):
            return model(x)

    return run


def checkpointed(model):
    return lambda x: checkpoint(model, x, use_reentrant=False)


def as_it_is(model):
    return model


def into_main_grad(features, **options):
    made = layer(features, wgrad=fg.Wgrad(into_main_grad=True), **options)
    made.weight.main_grad = torch.zeros(made.weight.shape)
    return made


def two_layers(features, **options):
    second = fg.Linear(features, 16, dtype=torch.bfloat16, recipe="fp8-current", **options)
    return nn.ModuleList([layer(features, **options), second])


USES = {
    **{recipe: (lambda n, r=recipe: layer(n, recipe=r), as_it_is, {}) for recipe in RECIPES},
    "dynamic": (layer, as_it_is, {"dynamic": True}),
    "quantized-weight": (lambda n: layer(n, quantized_weight=True), as_it_is, {}),
    "mxfp8-weight": (lambda n: layer(n, recipe="mxfp8", quantized_weight=True), as_it_is, {}),
    "between-layers": (two_layers, between_layers, {}),
    "out-of-the-graph": (layer, out_of_the_graph, {}),
    "autocast-inside": (lambda n: layer(n, recipe=None), autocast_inside, {}),
    "main-grad": (into_main_grad, as_it_is, {}),
    "saved-as-it-came": (lambda n: layer(n, save_input=fg.Save.ORIGINAL), as_it_is, {}),
    "checkpointed": (lambda n: layer(n, recipe="fp8-delayed"), checkpointed, {}),
}
"""Use -> (number of output features -> model, model -> what is compiled, options of `torch.compile`)."""


def digest(results):
    text = hashlib.sha256()
    for name, value in results.items():
        text.update(name.encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return text.hexdigest()


CACHES = {"fx": ("inductor", "fxgraph_cache"), "aot": ("aot_autograd", "autograd_cache")}


def hits():
    """What the caches did since the last time."""
    found = {
        cache: {what: counters[group][f"{name}_{what}"] for what in ("hit", "miss", "bypass")}
        for cache, (group, name) in CACHES.items()
    }
    torch._dynamo.reset()
    counters.clear()
    return found


def run(name):
    """Train and evaluate one use once: mode -> (digest, what the caches did)."""
    make, use, options = USES[name]
    torch.manual_seed(0)
    model = make(16 + 8 * list(USES).index(name))
    function = torch.compile(use(model), fullgraph=True, **options)
    leaf = tensors((24, K)).requires_grad_()
    output = function(leaf)
    results = bytes_of(output, "output")
    value = output.dequantize() if isinstance(output, fg.QuantizedTensor) else output
    value.backward(tensors(value.shape))
    results |= {**gradients(model, [leaf]), **state_of(model)}
    buffers = {n: getattr(p, "main_grad", None) for n, p in model.named_parameters()}
    results |= {f"main_grad of {n}": b for n, b in buffers.items() if b is not None}
    found = {"train": (digest(results), hits())}
    with torch.no_grad():
        found["eval"] = digest(bytes_of(function(leaf), "output")), hits()
    return found


def main(arguments):
    options = {}
    while arguments and arguments[0].startswith("--"):
        options[arguments[0]] = pathlib.Path(arguments[1])
        arguments = arguments[2:]
    if "--load" in options:
        torch.compiler.load_cache_artifacts(options["--load"].read_bytes())
    report = {name: run(name) for name in arguments or USES}
    if "--save" in options:
        artifacts, _ = torch.compiler.save_cache_artifacts()
        options["--save"].write_bytes(artifacts)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
