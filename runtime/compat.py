"""PyTorch's private names: every one that we use, and what is done in a release without it.

A private name may be gone, or be called in another way, in any release. So each is declared here,
tried at its first use, and replaced by a public or plain way if that fails: such a run is perhaps
slower, learns the same, and says in one line what it lost. Nothing else imports a private name.
"""

import importlib.util
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import repeat
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F

from config import ConfigError
from runtime.log import logger


@dataclass(frozen=True)
class Private:
    """How to try a private name, and what a run loses without it."""

    lost: str
    attempt: Callable[[Any], object] = lambda found: None
    """Raises unless what was found is as we know it."""


def called_with(*arguments: Any, **named: Any) -> Callable[[Any], object]:
    """An attempt that compares the call with the signature, for what cannot just be called."""
    return lambda found: inspect.signature(found).bind(*arguments, **named)


def _makes(result: list[float], *arguments: Any, **named: Any) -> Callable[[Any], object]:
    """An attempt at a function of many tensors, on one that holds a 3 and a 4."""

    def attempt(found: Callable[..., Any]) -> None:
        tensor = torch.tensor([3.0, 4.0], device="cpu")
        results = found([tensor], *arguments, **named)
        # In place, or a number.
        made = (tensor if len(result) > 1 else results[0].view(1)).tolist()
        if made != result:
            raise ValueError(f"it makes {made} instead of {result}")

    return attempt


def _multiplies_float8(found: Callable[..., torch.Tensor]) -> None:
    ones = torch.ones(16, 16, device="cpu").to(torch.float8_e4m3fn)
    scale, options = (
        torch.ones((), device="cpu"),
        {"out_dtype": torch.bfloat16, "use_fast_accum": False},
    )
    if found(ones, ones.t(), scale_a=scale, scale_b=scale, **options)[0, 0] != 16:
        raise ValueError("it does not multiply")


def _adds(found: Any) -> None:
    """An attempt at a number or a choice."""
    found + 0


_PER_TENSOR = "many tensors are worked on one by one"
_RECOMPUTED = "selective activation checkpointing recomputes it"
_UNSUPPORTED = "what was asked for cannot be had"

PRIVATE: Mapping[str, Private] = {
    # Many tensors at once
    "torch:_foreach_add_": Private(_PER_TENSOR, _makes([4.0, 5.0], [torch.ones(())])),
    "torch:_foreach_mul_": Private(_PER_TENSOR, _makes([6.0, 8.0], torch.tensor(2.0))),
    "torch:_foreach_zero_": Private(_PER_TENSOR, _makes([0.0, 0.0])),
    "torch:_foreach_norm": Private(_PER_TENSOR, _makes([5.0], 2.0, dtype=torch.float64)),
    "torch:_softmax_backward_data": Private(
        "attention by blocks has more passes over memory",
        lambda found: found(torch.ones(2), torch.ones(2), -1, torch.float32),
    ),
    # Matmuls in float8
    "torch:_scaled_mm": Private("float8 matmuls go through F.scaled_mm", _multiplies_float8),
    "torch:Tensor._make_wrapper_subclass": Private("weights are not gathered in float8"),
    "torch:_C._disabled_torch_function_impl": Private("weights are not gathered in float8"),
    # Process groups
    "torch.distributed:ProcessGroupGloo._Options": Private(
        "gloo has two threads for each group, which some releases let race",
        lambda made: (made()._threads, made()._devices, made()._timeout),
    ),
    "torch.distributed.distributed_c10d:default_pg_timeout": Private(
        "groups of meshes keep PyTorch's timeout"
    ),
    "torch.distributed.distributed_c10d:_world": Private(
        "all groups but the first keep the timeout of the start",
        lambda world: [dist.get_rank(group) for group in world.pg_map],
    ),
    "torch.distributed.distributed_c10d:_set_pg_timeout": Private(
        "groups keep the timeout of the start", called_with(timedelta(), None)
    ),
    # Parallelisms
    "torch.distributed._functional_collectives:all_to_all_single_autograd": Private(
        "all-to-alls are an autograd function of ours", called_with(None, None, None, None)
    ),
    "torch.distributed._composable.replicate_with_fsdp:replicate": Private(
        "ddp is HSDP whose shards are whole", called_with(None, mesh=None, mp_policy=None)
    ),
    "torch.distributed.tensor.placement_types:_StridedShard": Private(
        "tensor parallel cannot share a dim with FSDP",
        lambda made: (made(0, split_factor=2).dim, made(0, split_factor=2).split_factor),
    ),
    "torch.distributed._symmetric_memory:enable_symm_mem_for_group": Private(
        _UNSUPPORTED, called_with("")
    ),
    # Compiler
    "torch._inductor.config:_micro_pipeline_tp": Private(_UNSUPPORTED, _adds),
    "torch._functorch.config:activation_memory_budget": Private(_UNSUPPORTED, _adds),
    "torch._dynamo.config:skip_fwd_side_effects_in_bwd_under_checkpoint": Private(
        _UNSUPPORTED, _adds
    ),
    # Selective activation checkpointing
    **{
        f"torch:ops.{name}": Private(_RECOMPUTED)
        for name in (
            "aten.mm.default",
            "aten._grouped_mm.default",
            "aten._scaled_mm.default",
            "aten._scaled_dot_product_flash_attention.default",
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            "aten._scaled_dot_product_efficient_attention.default",
            "aten._scaled_dot_product_cudnn_attention.default",
            "higher_order.flex_attention",
            "higher_order.inductor_compiled_code",
            "_c10d_functional.reduce_scatter_tensor.default",
            "_c10d_functional.all_to_all_single.default",
        )
    },
    **{
        f"torch:ops.profiler.{name}": Private("profiled experts may not be recomputed selectively")
        for name in (
            "_record_function_enter_new.default",
            "_record_function_exit._RecordFunction",
        )
    },
    "torch.utils.checkpoint:SAC_IGNORED_OPS": Private(
        "profiled experts may not be recomputed selectively", lambda found: found | set()
    ),
    # What is seen
    "torch.cuda.memory:_record_memory_history": Private(
        _UNSUPPORTED, called_with(max_entries=1, enabled=None)
    ),
    "torch.cuda.memory:_dump_snapshot": Private(_UNSUPPORTED, called_with("")),
    "torch.cpu:_is_avx512_bf16_supported": Private(
        "whether this CPU has AVX-512 for bfloat16 is not known", lambda found: found()
    ),
    "torch.cpu:_is_amx_tile_supported": Private(
        "whether this CPU has AMX is not known", lambda found: found()
    ),
    # Benchmarks
    "torch.testing._internal.distributed.fake_pg:FakeStore": Private(
        _UNSUPPORTED, lambda made: made()
    ),
    "torch._dynamo.utils:calculate_time_spent": Private(
        "seconds of compilation are not known", called_with()
    ),
    "torch._utils:_get_available_device_type": Private(_UNSUPPORTED, called_with()),
}

DISABLED_TORCH_FUNCTION: Any = getattr(torch._C, "_disabled_torch_function_impl", None)
"""For classes of tensors, which are made when a file is imported."""


@cache
def find(path: str) -> Any:
    """What ``PRIVATE`` has at ``path``, or None if this release lacks it or has another: then one
    line is logged. The first call tries it."""
    found, problem = _try(path)
    if problem:
        logger.warning("torch %s: %s: %s", torch.__version__, problem, PRIVATE[path].lost)
    return found


def require(path: str, *, key: str) -> Any:
    """What ``PRIVATE`` has at ``path``; or ``ConfigError`` naming the ``key`` that wants it."""
    found, problem = _try(path)
    if problem:
        raise ConfigError([f"{key}: cannot be had with torch {torch.__version__}: {problem}"])
    return found


def configure(path: str, value: Any, *, key: str = "") -> None:
    """Set the option that ``PRIVATE`` has at ``path``.

    Where the release lacks it, ``ConfigError`` that names the ``key``; without one, do nothing.
    """
    if key:
        require(path, key=key)
    if not _try(path)[1]:
        owner, _, name = path.partition(":")
        setattr(pkgutil.resolve_name(owner), name, value)


@cache
def _try(path: str) -> tuple[Any, str]:
    name = path.replace(":", ".")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None, f"{name} is missing"
    try:
        PRIVATE[path].attempt(found)
    # Whatever it raises, it is not what we know.
    except Exception as error:
        return None, f"{name} is another ({error})"
    return found, ""


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
    # Public since 2.15.
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
            options = _one_worker(make_options(), timeout)
            # Options now; by their own names in a call before.
            for name in [name for name in others if hasattr(options, name)]:
                setattr(options, name, others[name])
            unknown = {name: value for name, value in others.items() if not hasattr(options, name)}
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
