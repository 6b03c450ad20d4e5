"""Every private or version-dependent symbol of torch that the framework touches, in one place.

Supported: torch 2.11 to 2.15. What lives here is checked by tests/compile on each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch._functorch import config as functorch_config
from torch.autograd import forward_ad
from torch.fx.experimental import proxy_tensor


def is_traced_symbol(value: int) -> bool:
    """Whether Dynamo, which traces this very call, takes an integer for a symbol; False outside of a trace."""
    if not torch.compiler.is_compiling():
        return False
    # Not at the top: it loads sympy, a third of a second, which every trace has loaded by now.
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(value)


def is_process_group(value: Any) -> bool:
    """Whether this is a process group of `torch.distributed`."""
    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)


def process_group(name: str) -> Any | None:
    """The process group of this name in this process, or None.

    `torch.distributed` has no public look-up by name; functional collectives use this one.
    """
    if not torch.distributed.is_available():
        return None
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._resolve_process_group(cast(Any, name))  # a NewType in 2.13
    except (RuntimeError, ValueError):  # both in use for an unknown name
        return None


def mark_no_version_check(tensors: Iterable[torch.Tensor]) -> None:
    """Tell AOTAutograd that these graph inputs may change between forward and backward.

    State that a later op mutates (an amax, a gradient buffer) is handed to the backward op by reference; without
    the mark a second microbatch in flight trips the saved-tensor version check. `autograd.Function` under Dynamo
    sets the same mark. Outside of a trace there is nothing to mark. Compiled autograd does not hand on tensors with the
    mark (torch 2.11 to 2.14: `call_aot_bwd_prologue` gets too few); there the version is checked.
    """
    if proxy_tensor.get_proxy_mode() is None or torch._dynamo.config.compiled_autograd:
        return
    for tensor in tensors:
        for proxy in proxy_tensor._get_proxies(tensor):
            proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def is_tracing() -> bool:
    """Whether AOTAutograd, or `make_fx`, records this very call."""
    return proxy_tensor.get_proxy_mode() is not None


def unchanged(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Versions of tensors are afterwards what they were, though an op ran that declares to change them."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def runs_while_traced(method: Any) -> Any:
    """Have Dynamo run a method of a module when it traces a call of it, and take its result for constant.

    `torch.compiler.assume_constant_result` does this, and imports Dynamo, and Triton, for it.
    """
    method._dynamo_marked_constant = True
    return method


def compile_graph(
    compiler: str,
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    watch: Callable[[torch.fx.GraphModule, bool], None],
) -> Callable[..., Any]:
    """Compile a graph of Dynamo as a `torch.compile` backend does, and show AOTAutograd's graphs on the way.

    Args:
        compiler: "aot_eager" or "inductor".
        module: the graph that Dynamo hands to a backend.
        inputs: its example inputs.
        watch: called with each graph that will run, and whether it is a backward one. AOTAutograd's own cache is off
            for this compilation, because a hit would show no graphs.
    """

    def seen(graph: torch.fx.GraphModule, is_backward: bool) -> torch.fx.GraphModule:
        watch(graph, is_backward)
        return graph

    if compiler == "inductor":
        from torch._inductor import compile_fx

        def inner(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            return compile_fx.compile_fx_inner(
                seen(graph, kwargs.get("is_backward", False)), *args, **kwargs
            )

        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx.compile_fx(module, inputs, inner_compile=inner)  # type: ignore[return-value]

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(seen(graph, False).forward),
        bw_compiler=lambda graph, _: make_boxed_func(seen(graph, True).forward),
        keep_inference_input_mutations=True,
    )
    return backend(module, inputs)


def graph_break(module: torch.fx.GraphModule) -> tuple[str, str] | None:
    """Why Dynamo ended this graph before the end of the function, and where; None if it did not."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    return reason.reason, f"{frame.filename}:{frame.lineno}" if frame else ""


def graph_break_counts() -> dict[str, int]:
    """Torch's own count of graph breaks in this process, by reason."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def recompile_error(call: Callable[[], Any]) -> str | None:
    """Run `call`; torch's message if it would recompile (it is then not run to its end), else None."""
    from torch._dynamo import config, exc

    try:
        with config.patch(error_on_recompile=True):
            call()
    except exc.RecompileError as error:
        return str(error)
    return None


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass right now, as when activation checkpointing runs a layer again."""
    return torch._C._current_graph_task_id() != -1


def is_exporting() -> bool:
    """Whether `torch.export` traces this very call; under Dynamo of torch 2.11 the public function always says so."""
    return torch.compiler._is_exporting_flag


def is_plain_call() -> bool:
    """Whether nothing looks into this very call: no transform, no forward-mode AD, no TorchScript trace, no export.

    In the path of every eager call, so written for speed.
    """
    return not (
        _transforms_active()
        or forward_ad._current_level >= 0
        or _is_scripting()
        or torch.compiler._is_exporting_flag
    )


_transforms_active = torch._C._are_functorch_transforms_active
_is_scripting = torch._C._is_tracing


def transform() -> str | None:
    """The name of the innermost `torch.func` transform around this very call ("Vmap", "Grad", "Jvp"), or None."""
    interpreter = cast(Any, torch._C)._functorch.peek_interpreter_stack()
    return None if interpreter is None else interpreter.key().name


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode AD carries a tangent along with this tensor."""
    return is_in_dual_level() and forward_ad.unpack_dual(tensor).tangent is not None


def is_in_dual_level() -> bool:
    """Whether this very call runs inside of `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a tensor class whose operations return plain tensors."""
