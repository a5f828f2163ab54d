"""Access to private names of PyTorch, with public fallbacks. No other file uses private names.

Any release may remove a private name or change its signature. Each is therefore declared in
``runtime/private_names.py`` and probed at its first use. If the probe fails, a public fallback
replaces it and one log line says so. The run trains the same model, possibly slower.
"""

import importlib.util
import logging
import os
import pkgutil
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from itertools import repeat
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

from config import ConfigError
from runtime.log import logger
from runtime.printable import first_line
from runtime.private_names import PRIVATE

DISABLED_TORCH_FUNCTION: Any = getattr(torch._C, "_disabled_torch_function_impl", None)
"""``__torch_function__`` of tensor subclasses, which are defined at import."""


def find(path: str) -> Any:
    """Return the private object at ``path``, None if this release lacks or changed it."""
    return _probe(path)[0] if has(path) else None


@cache
def has(path: str) -> bool:
    """True if the private name at ``path`` passes its probe. Logs a failure once."""
    problem = _probe(path)[1]
    if problem:
        logger.warning("PyTorch %s %s: %s", torch.__version__, problem, PRIVATE[path].consequence)
    return not problem


def require(path: str, *, key: str) -> Any:
    """Return the private object at ``path``. Raises ``ConfigError`` that names ``key``."""
    found, problem = _probe(path)
    if problem:
        raise ConfigError([f"{key}: not available: PyTorch {torch.__version__} {problem}"])
    return found


def configure(path: str, value: Any, *, key: str = "") -> None:
    """Set the private option at ``path``.

    If this release lacks it, raises ``ConfigError`` that names ``key``; without ``key``, does
    nothing.
    """
    if key:
        require(path, key=key)
    if not _probe(path)[1]:
        owner, _, name = path.partition(":")
        setattr(pkgutil.resolve_name(owner), name, value)


def raise_recompile_limit(count: int) -> None:
    """Allow ``count`` compilations of one function, unless more are allowed."""
    path = "torch._dynamo.config:recompile_limit"
    if has(path):
        configure(path, max(count, pkgutil.resolve_name(path)))


@cache
def _probe(path: str) -> tuple[Any, str]:
    """Return the object at ``path``, and its problem; "" if there is none."""
    name = path.replace(":", ".")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None, f"lacks {name}"
    try:
        PRIVATE[path].probe(found)
    # A changed object may raise anything.
    except Exception as error:
        return None, f"changed {name} ({error})"
    return found, ""


def inductor_options(**wanted: Any) -> dict[str, Any]:
    """Those of the ``wanted`` options that this release's inductor supports."""
    return {name: value for name, value in wanted.items() if has(f"torch._inductor.config:{name}")}


def is_installed(package: str) -> bool:
    """True if ``package`` is installed. Imports the parent package of a dotted name."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def foreach(name: str, tensors: Sequence[torch.Tensor], *arguments: Any, **named: Any) -> Any:
    """Apply the foreach op ``name`` ("norm", "mul_") to all tensors, with few kernels.

    An argument that is a list has one element per tensor. In-place ops mutate ``tensors``.
    """
    fused = find(f"torch:_foreach_{name}")
    if fused is not None:
        return fused(tensors, *arguments, **named)
    single = torch.linalg.vector_norm if name == "norm" else getattr(torch.Tensor, name)
    columns = (each if isinstance(each, list) else repeat(each) for each in arguments)
    return [single(*own, **named) for own in zip(tensors, *columns, strict=False)]


def softmax_backward(gradient: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Gradient of the scores, given ``gradient`` of ``probabilities = softmax(scores, dim=-1)``."""
    backward = find("torch:_softmax_backward_data")
    if backward is not None:
        return cast(torch.Tensor, backward(gradient, probabilities, -1, gradient.dtype))
    wide = torch.promote_types(gradient.dtype, torch.float32)
    weighted = gradient.to(wide) * probabilities
    total = weighted.sum(dim=-1, keepdim=True)
    return weighted.addcmul_(probabilities.to(wide), total, value=-1).to(gradient.dtype)


def scaled_mm() -> Callable[..., torch.Tensor]:
    """Float8 matmul: (a, b, scale_a=, scale_b=, out_dtype=, use_fast_accum=) to a tensor."""
    return find("torch:_scaled_mm") or _scaled_mm


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    per_tensor = F.ScalingType.TensorWise
    per_row = F.ScalingType.RowWise
    kinds = [per_tensor if scale.numel() == 1 else per_row for scale in (scale_a, scale_b)]
    return F.scaled_mm(
        a, b, scale_a, kinds[0], scale_b, kinds[1],
        output_dtype=out_dtype, use_fast_accum=use_fast_accum,
    )  # fmt: skip


def all_to_all() -> Callable[..., torch.Tensor]:
    """Differentiable all-to-all: (x, output_splits, input_splits, group) to the received rows.

    Splits are rows per rank, None for equal splits. Collective.
    """
    path = "torch.distributed._functional_collectives:all_to_all_single_autograd"
    return find(path) or _AllToAll.apply


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.output_splits, ctx.input_splits, ctx.group = output_splits, input_splits, group
        shape = x.shape if output_splits is None else (sum(output_splits), *x.shape[1:])
        out = x.new_empty(shape)
        dist.all_to_all_single(out, x.contiguous(), output_splits, input_splits, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = _AllToAll.apply(gradients[0], ctx.input_splits, ctx.output_splits, ctx.group)
        return grad, None, None, None


def all_gather_whole(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather every rank's ``part`` into ``whole`` without a copy. Collective."""
    # Named all_gather_single since 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def set_default_timeout(timeout: timedelta) -> None:
    """Set the timeout of process groups created from now on, those of meshes included.

    Otherwise they get 30 minutes, whatever the default group has. NCCL-only groups have another
    default.
    """
    if find("torch.distributed.distributed_c10d:default_pg_timeout") is not None:
        dist.distributed_c10d.default_pg_timeout = timeout


def set_timeout(timeout: timedelta) -> None:
    """Change the timeout of all existing process groups."""
    # Public since 2.14.
    set_one = getattr(dist, "set_timeout", None)
    set_one = set_one or find("torch.distributed.distributed_c10d:_set_pg_timeout")
    world = find("torch.distributed.distributed_c10d:_world")
    groups = [dist.group.WORLD] if world is None else list(world.pg_map)
    for group in groups if set_one else []:
        set_one(timeout, group)


def limit_gloo_to_one_thread() -> None:
    """Use one worker thread instead of two for gloo groups created from now on.

    In PyTorch 2.13 both threads write the name of their last op to one string without a lock
    (ProcessGroupGloo::runLoop). Names over 15 characters, such as the functional all-gather's, are
    on the heap and may be freed twice: a rank crashes every few hours.

    Groups also share one device, whose thread wakes up 100 times a second; PyTorch creates one for
    each group.
    """
    path = "torch.distributed:ProcessGroupGloo._Options"
    make_options = find(path)
    gloo = getattr(dist, "ProcessGroupGloo", None)
    if make_options is None or gloo is None or hasattr(gloo, "_two_workers_init"):
        return
    original = gloo._two_workers_init = gloo.__init__

    def init(self: Any, *args: Any, timeout: timedelta | None = None, **kwargs: Any) -> None:
        try:
            options, unknown = _one_worker(make_options(), timeout), {}
            for name, value in kwargs.items():
                # PyTorch rejects these arguments beside options, so they become options.
                if hasattr(options, name):
                    setattr(options, name, value)
                else:
                    unknown[name] = value
            original(self, *args, options, **unknown)
        # An unknown signature: call the original unchanged.
        except (AttributeError, TypeError) as error:
            problem, effect = first_line(str(error)), PRIVATE[path].consequence
            logger.warning("PyTorch %s: %s: %s", torch.__version__, problem, effect)
            given = {} if timeout is None else {"timeout": timeout}
            original(self, *args, **given, **kwargs)

    gloo.__init__ = init


def _one_worker(options: Any, timeout: timedelta | None) -> Any:
    """Set PyTorch's defaults, but with one thread and shared devices. Mutates ``options``."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    options._devices = _gloo_devices(dist.ProcessGroupGloo, names, os.getpid())
    options._threads = 1
    if timeout is not None:
        options._timeout = timeout
    return options


@cache
def _gloo_devices(gloo: Any, names: str, process: int) -> list[Any]:
    """Devices of the interfaces ``names``, else the default one; a forked process has its own."""
    # Not lazy: a rank that is connected to then waits beyond its timeout (pytorch/gloo#520).
    devices = [gloo.create_device(interface=name) for name in names.split(",") if name]
    return devices or [gloo.create_default_device()]


@cache
def silence_context_fn() -> None:
    """Silence the warning about in-place ops under selective checkpointing of compiled blocks.

    The models have none.
    """
    noisy = logging.getLogger("torch._higher_order_ops.wrap")
    noisy.addFilter(lambda record: "context_fn is passed" not in record.getMessage())
