"""The private names of PyTorch that we use, how each is probed, and what a run loses without it.

``runtime/compat.py`` finds them, and has the public or plain way to do without.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Private:
    """How to probe a private name, and what a run loses without it."""

    lost: str
    probe: Callable[[Any], object] = lambda found: None
    """Raises unless what was found is as we know it."""


def _accepts(*arguments: Any, **named: Any) -> Callable[[Any], object]:
    """A probe that compares the call with the signature, for what cannot just be called."""
    return lambda found: inspect.signature(found).bind(*arguments, **named)


def _makes(result: list[float], *arguments: Any, **named: Any) -> Callable[[Any], object]:
    """A probe of a function of many tensors, on one that holds a 3 and a 4."""

    def probe(found: Callable[..., Any]) -> None:
        tensor = torch.tensor([3.0, 4.0], device="cpu")
        results = found([tensor], *arguments, **named)
        # In place, or a number.
        made = (tensor if len(result) > 1 else results[0].view(1)).tolist()
        if made != result:
            raise ValueError(f"it makes {made} instead of {result}")

    return probe


def _multiplies_float8(found: Callable[..., torch.Tensor]) -> None:
    ones = torch.ones(16, 16, device="cpu").to(torch.float8_e4m3fn)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": False}
    scale = torch.ones((), device="cpu")
    if found(ones, ones.t(), scale_a=scale, scale_b=scale, **options)[0, 0] != 16:
        raise ValueError("it does not multiply")


def _is_number(found: Any) -> None:
    """A probe of a number, or of a switch."""
    found + 0


# Operations that selective activation checkpointing counts, saves and does not see.
MATMULS = ("aten.mm.default", "aten._grouped_mm.default", "aten._scaled_mm.default")
SAVED = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    # Attention within documents; the latter where the block around it is not compiled.
    "higher_order.flex_attention",
    "higher_order.inductor_compiled_code",
    # Recomputing a collective costs more than its result.
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
)
# FSDP marks its gathers of experts, inside a block, for profilers: more often in backward.
IGNORED = (
    "profiler._record_function_enter_new.default",
    "profiler._record_function_exit._RecordFunction",
)

PER_TENSOR = "many tensors are worked on one by one"
RECOMPUTED = "selective activation checkpointing recomputes it"
NOT_GATHERED = "weights are not gathered in float8"
PROFILED = "profiled experts may not be recomputed selectively"
UNSUPPORTED = "what was asked for cannot be had"

PRIVATE: Mapping[str, Private] = {
    # Many tensors at once
    "torch:_foreach_add_": Private(PER_TENSOR, _makes([4.0, 5.0], [torch.ones(())])),
    "torch:_foreach_mul_": Private(PER_TENSOR, _makes([6.0, 8.0], torch.tensor(2.0))),
    "torch:_foreach_zero_": Private(PER_TENSOR, _makes([0.0, 0.0])),
    "torch:_foreach_norm": Private(PER_TENSOR, _makes([5.0], 2.0, dtype=torch.float64)),
    "torch:_softmax_backward_data": Private(
        "attention by blocks has more passes over memory",
        lambda found: found(torch.ones(2), torch.ones(2), -1, torch.float32),
    ),
    # Matmuls in float8
    "torch:_scaled_mm": Private("float8 matmuls go through F.scaled_mm", _multiplies_float8),
    "torch:Tensor._make_wrapper_subclass": Private(NOT_GATHERED),
    "torch:_C._disabled_torch_function_impl": Private(NOT_GATHERED),
    "torch.distributed.tensor:DTensor._local_tensor": Private(
        NOT_GATHERED, lambda found: found.__get__
    ),
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
        "groups keep the timeout of the start", _accepts(timedelta(), None)
    ),
    # Parallelisms
    "torch.distributed._functional_collectives:all_to_all_single_autograd": Private(
        "all-to-alls are an autograd function of ours", _accepts(None, None, None, None)
    ),
    "torch.distributed._composable.replicate_with_fsdp:replicate": Private(
        "ddp is HSDP whose shards are whole", _accepts(None, mesh=None, mp_policy=None)
    ),
    "torch.distributed.tensor.placement_types:_StridedShard": Private(
        "tensor parallel cannot share a dim with FSDP",
        lambda made: (made(0, split_factor=2).dim, made(0, split_factor=2).split_factor),
    ),
    "torch.distributed._symmetric_memory:enable_symm_mem_for_group": Private(
        UNSUPPORTED, _accepts("")
    ),
    # Compiler
    "torch._inductor.config:bucket_all_gathers_fx": Private("weights are gathered one by one"),
    "torch._inductor.config:bucket_reduce_scatters_fx": Private("gradients are reduced one by one"),
    "torch._inductor.config:wrap_inductor_compiled_regions": Private(RECOMPUTED),
    "torch._inductor.config:_micro_pipeline_tp": Private(UNSUPPORTED, _is_number),
    "torch._functorch.config:activation_memory_budget": Private(UNSUPPORTED, _is_number),
    "torch._dynamo.config:skip_fwd_side_effects_in_bwd_under_checkpoint": Private(
        UNSUPPORTED, _is_number
    ),
    # Selective activation checkpointing
    **{f"torch:ops.{name}": Private(RECOMPUTED) for name in (*MATMULS, *SAVED)},
    **{f"torch:ops.{name}": Private(PROFILED) for name in IGNORED},
    "torch.utils.checkpoint:SAC_IGNORED_OPS": Private(PROFILED, lambda found: found | set()),
    # What is seen
    "torch.cuda.memory:_record_memory_history": Private(
        UNSUPPORTED, _accepts(max_entries=1, enabled=None)
    ),
    "torch.cuda.memory:_dump_snapshot": Private(UNSUPPORTED, _accepts("")),
    "torch.cpu:_is_avx512_bf16_supported": Private(
        "whether this CPU has AVX-512 for bfloat16 is not known", lambda found: found()
    ),
    "torch.cpu:_is_amx_tile_supported": Private(
        "whether this CPU has AMX is not known", lambda found: found()
    ),
    # Benchmarks
    "torch.testing._internal.distributed.fake_pg:FakeStore": Private(
        UNSUPPORTED, lambda made: made()
    ),
    "torch._dynamo.utils:calculate_time_spent": Private(
        "seconds of compilation are not known", _accepts()
    ),
    "torch._utils:_get_available_device_type": Private(UNSUPPORTED, _accepts()),
}
