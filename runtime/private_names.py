"""Private names of PyTorch in use, the probe of each, and the consequence of its absence.

``runtime/compat.py`` resolves them and implements the fallbacks.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class PrivateName:
    """Probe of a private name, and the consequence of its absence for the log."""

    consequence: str
    probe: Callable[[Any], object] = lambda found: None
    """Raises if the object is not as expected."""


def _accepts(*arguments: Any, **named: Any) -> Callable[[Any], object]:
    """Return a probe that checks only the signature, for functions that cannot be called."""
    return lambda found: inspect.signature(found).bind(*arguments, **named)


def _returns(result: list[float], *arguments: Any, **named: Any) -> Callable[[Any], object]:
    """Return a probe that applies a foreach op to the tensor [3, 4]."""

    def probe(found: Callable[..., Any]) -> None:
        tensor = torch.tensor([3.0, 4.0], device="cpu")
        results = found([tensor], *arguments, **named)
        # A list of two is the mutated tensor, of one a returned scalar.
        actual = (tensor if len(result) > 1 else results[0].view(1)).tolist()
        if actual != result:
            raise ValueError(f"returns {actual} instead of {result}")

    return probe


def _check_float8_matmul(found: Callable[..., torch.Tensor]) -> None:
    ones = torch.ones(16, 16, device="cpu").to(torch.float8_e4m3fn)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": False}
    scale = torch.ones((), device="cpu")
    if found(ones, ones.t(), scale_a=scale, scale_b=scale, **options)[0, 0] != 16:
        raise ValueError("wrong matmul result")


def _check_number(found: Any) -> None:
    """Probe of a number or a bool: raises ``TypeError`` for anything else."""
    found + 0


def _check_no_task(found: Callable[[], int]) -> None:
    if found() != -1:
        raise ValueError("is not -1 outside of backward")


# Ops that selective activation checkpointing counts (MATMULS), saves (SAVED, and COPIES to the
# host) and ignores.
MATMULS = ("aten.mm.default", "aten._grouped_mm.default", "aten._scaled_mm.default")
SAVED = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    # FlexAttention; the second name applies where the block around it is not compiled.
    "higher_order.flex_attention",
    "higher_order.inductor_compiled_code",
    # Recomputing a collective costs more than its result.
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
)
COPIES = ("aten._to_copy.default",)
# FSDP's profiler marks for the all-gathers of experts in a block; backward has more of them.
IGNORED = (
    "profiler._record_function_enter_new.default",
    "profiler._record_function_exit._RecordFunction",
)

PER_TENSOR = "foreach ops run one tensor at a time"
RECOMPUTED = "selective activation checkpointing recomputes this op"
NOT_GATHERED = "nothing is all-gathered in float8"
PROFILED = "selective activation checkpointing of experts may fail under the profiler"
UNSUPPORTED = "the requested feature is not available"

PRIVATE: Mapping[str, PrivateName] = {
    # Foreach ops
    "torch:_foreach_add_": PrivateName(PER_TENSOR, _returns([4.0, 5.0], [torch.ones(())])),
    "torch:_foreach_mul_": PrivateName(PER_TENSOR, _returns([6.0, 8.0], torch.tensor(2.0))),
    "torch:_foreach_zero_": PrivateName(PER_TENSOR, _returns([0.0, 0.0])),
    "torch:_foreach_norm": PrivateName(PER_TENSOR, _returns([5.0], 2.0, dtype=torch.float64)),
    "torch:_softmax_backward_data": PrivateName(
        "block attention needs more memory passes",
        lambda found: found(torch.ones(2), torch.ones(2), -1, torch.float32),
    ),
    # Matmuls in float8
    "torch:_scaled_mm": PrivateName("float8 matmuls use F.scaled_mm", _check_float8_matmul),
    "torch:Tensor._make_wrapper_subclass": PrivateName(NOT_GATHERED),
    "torch:_C._disabled_torch_function_impl": PrivateName(NOT_GATHERED),
    "torch.distributed.tensor:DTensor._local_tensor": PrivateName(
        NOT_GATHERED, lambda found: found.__get__
    ),
    # Process groups
    "torch.distributed:ProcessGroupGloo._Options": PrivateName(
        "gloo groups have two threads, which race in some releases",
        lambda cls: (cls()._threads, cls()._devices, cls()._timeout),
    ),
    "torch.distributed.distributed_c10d:default_pg_timeout": PrivateName(
        "process groups of meshes keep PyTorch's default timeout"
    ),
    "torch.distributed.distributed_c10d:_world": PrivateName(
        "all process groups but the default one keep comm.init_timeout_seconds",
        lambda world: [dist.get_rank(group) for group in world.pg_map],
    ),
    "torch.distributed.distributed_c10d:_set_pg_timeout": PrivateName(
        "process groups keep comm.init_timeout_seconds", _accepts(timedelta(), None)
    ),
    "torch._C._distributed_c10d:_dump_fr_trace": PrivateName(
        "a run that hangs leaves no record of its collectives on the CPU"
    ),
    # Parallelisms
    "torch.distributed._functional_collectives:all_to_all_single_autograd": PrivateName(
        "all-to-all uses Shardloom's autograd function", _accepts(None, None, None, None)
    ),
    "torch.distributed._composable.replicate_with_fsdp:replicate": PrivateName(
        "ddp runs as HSDP with a shard degree of 1", _accepts(None, mesh=None, mp_policy=None)
    ),
    "torch.distributed.tensor.placement_types:_StridedShard": PrivateName(
        "tensor parallel and FSDP cannot shard the same dim",
        lambda cls: (cls(0, split_factor=2).dim, cls(0, split_factor=2).split_factor),
    ),
    "torch.distributed._symmetric_memory:enable_symm_mem_for_group": PrivateName(
        UNSUPPORTED, _accepts("")
    ),
    # Compiler
    "torch._inductor.config:bucket_all_gathers_fx": PrivateName("all-gathers are not bucketed"),
    "torch._inductor.config:bucket_reduce_scatters_fx": PrivateName(
        "reduce-scatters are not bucketed"
    ),
    "torch._inductor.config:wrap_inductor_compiled_regions": PrivateName(RECOMPUTED),
    "torch._inductor.config:_micro_pipeline_tp": PrivateName(UNSUPPORTED, _check_number),
    "torch._functorch.config:activation_memory_budget": PrivateName(UNSUPPORTED, _check_number),
    "torch._dynamo.config:skip_fwd_side_effects_in_bwd_under_checkpoint": PrivateName(
        UNSUPPORTED, _check_number
    ),
    "torch._dynamo.config:recompile_limit": PrivateName(
        "compiled models with three kinds of layers fail when they sample", _check_number
    ),
    # Selective activation checkpointing
    **{f"torch:ops.{name}": PrivateName(RECOMPUTED) for name in (*MATMULS, *SAVED, *COPIES)},
    **{f"torch:ops.{name}": PrivateName(PROFILED) for name in IGNORED},
    "torch.utils.checkpoint:SAC_IGNORED_OPS": PrivateName(PROFILED, lambda found: found | set()),
    "torch._dynamo.utils:get_compilation_metrics": PrivateName(
        "steps that recompile are not reported", _accepts()
    ),
    # Memory snapshots and CPU features
    "torch.cuda.memory:_record_memory_history": PrivateName(
        UNSUPPORTED, _accepts(max_entries=1, enabled=None)
    ),
    "torch.cuda.memory:_dump_snapshot": PrivateName(UNSUPPORTED, _accepts("")),
    "torch.cpu:_is_avx512_bf16_supported": PrivateName(
        "AVX-512 bfloat16 support of this CPU is unknown", lambda found: found()
    ),
    "torch.cpu:_is_amx_tile_supported": PrivateName(
        "AMX support of this CPU is unknown", lambda found: found()
    ),
    # A mode that sees each operator, for initial weights and plans of a step; there, fake tensors
    "torch.utils._python_dispatch:TorchDispatchMode": PrivateName(
        "random values of init_weights are not noticed", lambda cls: cls()
    ),
    "torch._subclasses.fake_tensor:FakeTensorMode": PrivateName(UNSUPPORTED, lambda cls: cls()),
    "torch._subclasses.fake_tensor:FakeTensor": PrivateName(UNSUPPORTED),
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache": PrivateName(
        "plans of several ranks may fail"
    ),
    "torch.utils._pytree:tree_leaves": PrivateName(UNSUPPORTED, lambda found: found([1])),
    "torch._C:_current_graph_task_id": PrivateName(UNSUPPORTED, _check_no_task),
    "torch._C:_get_dispatch_mode": PrivateName(UNSUPPORTED),
    "torch._C:_TorchDispatchModeKey.FAKE": PrivateName(UNSUPPORTED),
    # Benchmarks
    "torch.testing._internal.distributed.fake_pg:FakeStore": PrivateName(
        UNSUPPORTED, lambda cls: cls()
    ),
    "torch._dynamo.utils:calculate_time_spent": PrivateName("compile time is unknown", _accepts()),
    "torch._utils:_get_available_device_type": PrivateName(UNSUPPORTED, _accepts()),
}
