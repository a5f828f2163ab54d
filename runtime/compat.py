"""The only way to a private name of PyTorch, and what is done in a release without it.

A private name may be gone, or be called in another way, in any release. So each is declared in
``runtime/private_names.py``, probed at its first use, and replaced by a public or plain way if that
fails: such a run is perhaps slower, learns the same, and says in one line what it lost.
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
from runtime.private_names import PRIVATE

DISABLED_TORCH_FUNCTION: Any = getattr(torch._C, "_disabled_torch_function_impl", None)
"""For classes of tensors, which are made when a file is imported."""


def find(path: str) -> Any:
    """What ``PRIVATE`` has at ``path``; None if this release lacks it or changed it."""
    return _probe(path)[0] if has(path) else None


@cache
def has(path: str) -> bool:
    """Whether this release has what ``PRIVATE`` has at ``path``, unchanged; if not, log it once."""
    problem = _probe(path)[1]
    if problem:
        logger.warning("torch %s: %s: %s", torch.__version__, problem, PRIVATE[path].lost)
    return not problem


def require(path: str, *, key: str) -> Any:
    """What ``PRIVATE`` has at ``path``; ``ConfigError`` naming ``key``, which needs it, without."""
    found, problem = _probe(path)
    if problem:
        raise ConfigError([f"{key}: not available with torch {torch.__version__}: {problem}"])
    return found


def configure(path: str, value: Any, *, key: str = "") -> None:
    """Set the option that ``PRIVATE`` has at ``path``.

    Where the release lacks it, ``ConfigError`` that names the ``key``; without one, do nothing.
    """
    if key:
        require(path, key=key)
    if not _probe(path)[1]:
        owner, _, name = path.partition(":")
        setattr(pkgutil.resolve_name(owner), name, value)


@cache
def _probe(path: str) -> tuple[Any, str]:
    """What is at ``path``, and what is wrong with it; "" if nothing is."""
    name = path.replace(":", ".")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None, f"{name} is missing"
    try:
        PRIVATE[path].probe(found)
    # Whatever it raises, it is not what we know.
    except Exception as error:
        return None, f"{name} has changed ({error})"
    return found, ""


def inductor_options(**wanted: Any) -> dict[str, Any]:
    """Those of the ``wanted`` options that this release's inductor has."""
    return {name: value for name, value in wanted.items() if has(f"torch._inductor.config:{name}")}


def is_installed(package: str) -> bool:
    """Whether ``package`` is there; to find one inside another, the outer one is imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def foreach(name: str, tensors: Sequence[torch.Tensor], *arguments: Any, **named: Any) -> Any:
    """The operation of that ``name`` ("norm", "mul_") on each tensor, in one kernel for many.

    An argument that is a list has an element for each tensor.
    """
    together = find(f"torch:_foreach_{name}")
    if together is not None:
        return together(tensors, *arguments, **named)
    alone = torch.linalg.vector_norm if name == "norm" else getattr(torch.Tensor, name)
    columns = (each if isinstance(each, list) else repeat(each) for each in arguments)
    return [alone(*own, **named) for own in zip(tensors, *columns, strict=False)]


def softmax_backward(gradient: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """The gradient of what softmax made ``probabilities`` of, along the last dim."""
    backward = find("torch:_softmax_backward_data")
    if backward is not None:
        return cast(torch.Tensor, backward(gradient, probabilities, -1, gradient.dtype))
    wide = torch.promote_types(gradient.dtype, torch.float32)
    weighted = gradient.to(wide) * probabilities
    total = weighted.sum(dim=-1, keepdim=True)
    return weighted.addcmul_(probabilities.to(wide), total, value=-1).to(gradient.dtype)


def scaled_mm() -> Callable[..., torch.Tensor]:
    """The matmul of float8 matrices: (a, b, scale_a=, scale_b=, out_dtype=, use_fast_accum=)."""
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
    one = F.ScalingType.TensorWise
    each = F.ScalingType.RowWise
    kinds = [one if scale.numel() == 1 else each for scale in (scale_a, scale_b)]
    return F.scaled_mm(
        a, b, scale_a, kinds[0], scale_b, kinds[1],
        output_dtype=out_dtype, use_fast_accum=use_fast_accum,
    )  # fmt: skip


def all_to_all() -> Callable[..., torch.Tensor]:
    """The all-to-all that has a gradient: (x, sizes that come, sizes that go, group) to what came;
    None for equal sizes."""
    path = "torch.distributed._functional_collectives:all_to_all_single_autograd"
    return find(path) or _AllToAll.apply


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        come: list[int] | None,
        go: list[int] | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.come, ctx.go, ctx.group = come, go, group
        shape = x.shape if come is None else (sum(come), *x.shape[1:])
        out = x.new_empty(shape)
        dist.all_to_all_single(out, x.contiguous(), come, go, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = _AllToAll.apply(gradients[0], ctx.go, ctx.come, ctx.group)
        return back, None, None, None


def all_gather_whole(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``whole`` with every rank's ``part``, without a copy. A collective."""
    # Its name since 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


def set_default_timeout(timeout: timedelta) -> None:
    """Give this timeout to every process group made from now on, such as those of meshes, which
    would have half an hour whatever the first group has. NCCL's alone have another default."""
    if find("torch.distributed.distributed_c10d:default_pg_timeout") is not None:
        dist.distributed_c10d.default_pg_timeout = timeout


def set_timeout(timeout: timedelta) -> None:
    """Change the timeout of every process group, now that warm-up is over."""
    # Public since 2.14.
    change = getattr(dist, "set_timeout", None)
    change = change or find("torch.distributed.distributed_c10d:_set_pg_timeout")
    world = find("torch.distributed.distributed_c10d:_world")
    groups = [dist.group.WORLD] if world is None else list(world.pg_map)
    for group in groups if change else []:
        change(timeout, group)


def give_gloo_one_worker() -> None:
    """Have every gloo group made from now on run its collectives in one thread, not in two.

    In 2.13 both threads write the name of what they finished last to one string without a lock
    (ProcessGroupGloo::runLoop). Names of more than 15 letters, such as the functional all-gather's,
    are on the heap, and are at times freed twice: every few hours a rank dies of it.
    """
    path = "torch.distributed:ProcessGroupGloo._Options"
    make_options = find(path)
    gloo = getattr(dist, "ProcessGroupGloo", None)
    if make_options is None or gloo is None or hasattr(gloo, "_two_workers_init"):
        return
    original = gloo._two_workers_init = gloo.__init__

    def init(self: Any, *place: Any, timeout: timedelta | None = None, **others: Any) -> None:
        try:
            options, unknown = _one_worker(make_options(), timeout), {}
            for name, value in others.items():
                # With options given, PyTorch wants such arguments among them.
                if hasattr(options, name):
                    setattr(options, name, value)
                else:
                    unknown[name] = value
            original(self, *place, options, **unknown)
        # Called as in no release before: PyTorch knows how.
        except (AttributeError, TypeError) as error:
            problem, lost = str(error).partition("\n")[0], PRIVATE[path].lost
            logger.warning("torch %s: %s: %s", torch.__version__, problem, lost)
            given = {} if timeout is None else {"timeout": timeout}
            original(self, *place, **given, **others)

    gloo.__init__ = init


def _one_worker(options: Any, timeout: timedelta | None) -> Any:
    """``options`` as PyTorch itself would choose, which it does only when it is given none."""
    gloo: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [gloo.create_device(interface=name) for name in names]
    options._threads, options._devices = 1, devices or [gloo.create_default_device()]
    if timeout is not None:
        options._timeout = timeout
    return options


def silence_context_fn() -> None:
    """Keep back a warning on each compiled block that is recomputed selectively: it asks that
    nothing there works in place, which is so."""
    noisy = logging.getLogger("torch._higher_order_ops.wrap")
    noisy.addFilter(lambda record: "context_fn is passed" not in record.getMessage())
