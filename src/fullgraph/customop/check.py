"""`CustomOp.check`: everything that can be wrong with an op, tried on one example, on any device.

- opcheck: torch's five tests of schema, autograd registration, fake tensors and AOT dispatch;
- plan against real results, forward and backward (`verify.py`);
- the CUDA-graph lint: no device synchronisation, no result that shares memory with an input, nothing that an op
  keeps alive behind the caller's back on its first call.

The lint sees torch ops. What a kernel does below the dispatcher only a run on the device shows.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fullgraph.customop import verify
from fullgraph.customop.lean import KERNELS
from fullgraph.customop.op import CustomOp
from fullgraph.customop.structured import StructuredTensor, flatten
from fullgraph.errors import CompileError

OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)

SYNCHRONISING = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::is_nonzero",
        "aten::nonzero",
        "aten::equal",
        "aten::masked_select",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::repeat_interleave",
    }
)
"""Ops that make the host wait for the device, or whose output shape depends on data."""


class _Recorder(TorchDispatchMode):
    """Notes synchronising ops and every tensor that is made while it is active, inside of custom ops too."""

    def __init__(self) -> None:
        super().__init__()
        self.synchronising: list[str] = []
        self.made: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in KERNELS:
            with self:
                return KERNELS[func](*args, **(kwargs or {}))
        name = func._schema.name
        if name in SYNCHRONISING or _synchronises(name, args, kwargs or {}):
            self.synchronising.append(name)
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.made.append((name, weakref.ref(value)))
        return result


def _synchronises(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Ops that make the host wait for some arguments only."""
    if name == "aten::_to_copy":
        target = kwargs.get("device")
        return (
            target is not None
            and args[0].device.type != "cpu"
            and torch.device(target).type == "cpu"
        )
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return False


def cuda_graph_lint(function: Callable[..., Any], *inputs: Any) -> None:
    """Raise if a function could not be captured in a CUDA graph, as far as its torch ops show.

    Args:
        function: called once with `inputs`.
        *inputs: tensors and anything else.

    Raises:
        CompileError: a synchronisation, a result that aliases an input or another result, or a tensor that outlives
            the call without being a result.
    """
    _lint(getattr(function, "__name__", str(function)), function, inputs)


def _lint(name: str, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """See `cuda_graph_lint`; returns what the function does."""
    recorder = _Recorder()
    with recorder:
        result = function(*inputs)
    if recorder.synchronising:
        raise CompileError(
            f"{name}: not capturable, it calls {', '.join(dict.fromkeys(recorder.synchronising))}",
            why="the host would wait for the device, or a shape would depend on data",
            do="keep the value in a tensor",
        )
    results = [t for t in _tensors(result) if t.numel()]
    owners = {t.untyped_storage()._cdata: "an input" for t in _tensors(inputs) if t.numel()}
    for index, tensor in enumerate(results):
        storage = tensor.untyped_storage()._cdata
        if storage in owners:
            raise CompileError(
                f"{name}: result {index} shares memory with {owners[storage]}",
                why="graph replays would write into memory that the caller owns",
                do="return a copy",
            )
        owners[storage] = f"result {index}"
    gc.collect()
    kept = [
        op for op, ref in recorder.made if (t := ref()) is not None and not _in_storage(t, owners)
    ]
    if kept:
        raise CompileError(
            f"{name}: keeps tensors alive after the call, made by {', '.join(dict.fromkeys(kept))}",
            why="what a first call allocates and caches would live in the memory pool of the graph",
            do="make constants before the first trace and pass them in",
        )
    return result


def _in_storage(tensor: torch.Tensor, owners: dict[int, str]) -> bool:
    return tensor.numel() == 0 or tensor.untyped_storage()._cdata in owners


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, StructuredTensor):
        return flatten(value)
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def check(op: CustomOp, arguments: Any) -> None:
    """See `CustomOp.check`."""
    tensors = [getattr(arguments, name) for name in op._tensor_names]
    dyn = [getattr(arguments, name) for name in op._dyn_names]
    token = op.encode(**{name: getattr(arguments, name) for name in op._value_names})
    with verify.verify_plans():
        recorded = _run_with_lint(op, token, dyn, tensors)
        if not any(isinstance(t, StructuredTensor) for t in tensors):
            _opcheck(op.front_op, (token, dyn, *tensors), OPCHECKS)
        for overload, args in recorded:
            _opcheck(
                overload, args, tuple(t for t in OPCHECKS if t != "test_autograd_registration")
            )


def _run_with_lint(
    op: CustomOp, token: str, dyn: list[Any], tensors: list[Any]
) -> list[tuple[Any, tuple]]:
    """Run forward and backward on copies, each lean op under the lint, and note how each was called.

    The lint comes with the first run: what an op allocates and caches on its first call shows then only.
    """
    calls: list[tuple[Any, tuple]] = []
    wanted = {*op.fwd_ops, *op.bwd_ops}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func not in wanted:
                return func(*args, **(kwargs or {}))
            calls.append((func, _detached(args)))
            return _lint(str(func), func, args)

    gradients = set(op._gradients)
    copies = [
        None
        if t is None
        else t.detach().clone().requires_grad_(t.requires_grad and name in gradients)
        for name, t in zip(op._tensor_names, tensors, strict=True)
    ]
    with Watch():
        outputs = op.apply(token, dyn, copies)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        differentiable = [o for o in outputs if o is not None and o.requires_grad]
        if differentiable:
            torch.autograd.backward(
                differentiable,
                [torch.ones(o.shape, dtype=o.dtype, device=o.device) for o in differentiable],
            )
    return calls


def _detached(args: tuple) -> tuple:
    copy = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)
    return tuple(copy)


def _opcheck(overload: Any, args: tuple, tests: tuple[str, ...]) -> None:
    with warnings.catch_warnings():  # of opcheck's own doing
        warnings.filterwarnings(
            "ignore", message="The .grad attribute of a Tensor that is not a leaf"
        )
        results = torch.library.opcheck(overload, args, test_utils=tests, raise_exception=False)
    failed = {test: outcome for test, outcome in results.items() if outcome != "SUCCESS"}
    if failed:
        test, outcome = next(iter(failed.items()))
        raise CompileError(
            f"{overload}: opcheck {test} failed: {outcome}",
            why="torch.compile relies on what this test checks",
            do="see torch.library.opcheck for what it means",
        )
