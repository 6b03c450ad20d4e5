"""What the tests of processes run in other processes: importable by name, as `spawn` and `forkserver` need it."""

import hashlib
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fullgraph as fg
from fullgraph.customop.op import defined_ops
from fullgraph.customop.token import CACHES
from linear_cases import gradients, state_of

K, N, TOKENS = 32, 48, 8


def new_model(recipe):
    """Two layers; every call makes the same ones."""
    options = {"dtype": torch.bfloat16, "recipe": recipe}
    model = nn.Sequential(fg.Linear(K, N, **options), nn.ReLU(), fg.Linear(N, K, **options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values / K**0.5)
    return model


def everything(model):
    """Parameters, gradients, scales and amaxes by name."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    found |= gradients(model)
    for name, layer in model.named_modules():
        found |= {f"{name}.{key}": t for key, t in state_of(layer).items()}
    return found


def is_random(model):
    return any(isinstance(m, fg.Linear) and m.recipe.draws_backward for m in model.modules())


def train(model, function=None, steps=3):
    """Train, and return everything that came out."""
    function = model if function is None else function
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    delayed = any(isinstance(m, fg.Linear) and m.scaling_state.rule for m in model.modules())
    generator = torch.Generator().manual_seed(3)
    if is_random(model):
        torch.manual_seed(4)
    for _ in range(steps):
        x = torch.randn(TOKENS, K, generator=generator).bfloat16()
        optimizer.zero_grad()
        output = function(x)
        output.backward(torch.ones_like(output) / 64)
        optimizer.step()
        if delayed:
            fg.update_scales(model)
    return {"output": output.detach(), **everything(model)}


def digest(results):
    text = hashlib.sha256()
    for name, value in results.items():
        text.update(
            name.encode() + value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        )
    return text.hexdigest()


def train_new(recipe, backend=None, **options):
    """The digest of training a new model, perhaps compiled."""
    torch.set_num_threads(1)
    function = model = new_model(recipe)
    if backend is not None:
        function = torch.compile(model, backend=backend, fullgraph=True, **options)
    return digest(train(model, function))


WAYS = [
    ("fp8-delayed", None),
    ("nvfp4", None),
    ("fp8-delayed", "aot_eager"),
    ("mxfp8", "aot_eager"),
]
"""Recipe and compiler of what children train."""


def train_all():
    return [train_new(*way) for way in WAYS]


def send_all(queue):
    queue.put(train_all())


def train_given(queue, model):
    """Train a model that came from another process, in place."""
    torch.set_num_threads(1)
    queue.put(digest(train(model)))


def in_child(method, target, *args):
    """What a function of this module puts into a queue, in a child started in this way."""
    context = torch.multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=target, args=(queue, *args))
    child.start()
    found = queue.get(timeout=240)
    child.join(60)
    assert child.exitcode == 0
    return found


class Quantized(Dataset):
    """Quantizes in the worker and runs a layer there."""

    def __init__(self):
        torch.manual_seed(1)
        self.layer = fg.Linear(K, N, recipe="fp8-current")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = torch.full((1, K), float(index + 1))
        with torch.no_grad():
            return self.layer(fg.quantize(x, fg.PerTensorQuantizer(fg.Format.E4M3)))[0]


def check_children(method):
    """Children train as their parent does, compiled or not, after it did so itself; shared parameters are shared."""
    expected = train_all()
    assert in_child(method, send_all) == expected
    model, other = new_model("nvfp4"), new_model("nvfp4")
    model.share_memory()
    assert in_child(method, train_given, model) == digest(train(other))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    data = Quantized()
    loader = DataLoader(data, num_workers=1, multiprocessing_context=method)
    assert torch.equal(torch.cat(list(loader)), torch.stack([data[i] for i in range(4)]))
    assert train_all() == expected


def check_threads(compiled_too):
    """Threads that train models of the same classes at once do what one thread does."""
    recipes = list(fg.recipes.BY_NAME)
    recipes.remove("nvfp4")  # threads share the generator
    expected = {recipe: train_new(recipe) for recipe in recipes}
    failures = []
    barrier = threading.Barrier(8)

    def work(number):
        try:
            barrier.wait(60)
            for i in range(len(recipes)):
                recipe = recipes[(number + i) % len(recipes)]
                # Threads that meet may compile the same twice, and all of it is one function to torch.
                compiled = compiled_too and (number + i) % 2
                options = {"backend": "aot_eager", "recompile_limit": 256} if compiled else {}
                if train_new(recipe, **options) != expected[recipe]:
                    failures.append((number, recipe, options))
        except Exception as error:  # noqa: BLE001 (all of them are told at the end)
            failures.append((number, repr(error)))

    for op in defined_ops():  # everything is found again, by all of them at once
        op._calls.clear()
    for cache in CACHES:
        cache.clear()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
