"""Pipeline parallel: each rank holds stages of layers, and microbatches pass through the stages.

Schedules: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from config import ConfigError
from config.job_config import Parallelism
from parallelisms.tied_weights import fqns_by_parameter
from runtime.dtensor import to_local
from runtime.log import logger


class PipelineSplit(Protocol):
    """Functions that split a model into stages; ``models.ModelSpec`` has them."""

    @property
    def blocks(self) -> Callable[[Any], nn.ModuleDict]: ...
    @property
    def split_stage(self) -> Callable[[Any, range], None]: ...
    @property
    def merge_stages(self) -> Callable[[Any, list[Any]], None]: ...


def apply_pipeline_parallel(
    model: nn.Module,
    pp_mesh: DeviceMesh,
    *,
    split: PipelineSplit,
    parallelism: Parallelism,
    parallelize_stage: Callable[[nn.Module], None],
) -> list[nn.Module]:
    """Split ``model``, still on the meta device; return this rank's stages in order.

    ``parallelize_stage`` applies the other parallelisms to each stage. Mutates ``model``: it keeps
    the parameters of these stages under the same FQNs, and can no longer be called.
    """
    layers = _layers_of_stages(model, pp_mesh.size(), split, parallelism)
    stages = []
    for index in _stage_indices(pp_mesh, len(layers)):
        stage = deepcopy(model)
        split.split_stage(stage, layers[index])
        parallelize_stage(stage)
        stages.append(stage)
    split.merge_stages(model, stages)
    _check_merged(model, stages)
    logger.info(
        "pipeline parallel: pp = %d, layers per stage = %s, schedule = %s",
        pp_mesh.size(), [len(stage) for stage in layers], parallelism.pipeline_parallel_schedule,
    )  # fmt: skip
    return stages


def _check_merged(model: nn.Module, stages: list[nn.Module]) -> None:
    """Raise ``ValueError`` unless ``model`` has the tensors of ``stages``, and no others."""
    merged, staged = (
        {id(t): fqn for m in ms for fqn, t in [*m.named_parameters(), *m.named_buffers()]}
        for ms in ([model], stages)
    )
    unequal = {**merged, **staged}.items()
    fqns = dict.fromkeys(fqn for key, fqn in unequal if key not in merged or key not in staged)
    if fqns:
        text = "the model must have the tensors of the rank's stages, and no others"
        raise ValueError(f"merge_stages does not handle {', '.join(fqns)}: {text}")


def tied_across_stages(
    model: nn.Module, pp: int, *, split: PipelineSplit, parallelism: Parallelism, is_outside: bool
) -> list[str]:
    """Return the first FQN of each parameter that the first and the last stage share.

    ``model``: still whole, on the meta device. ``is_outside``: the user's own; raises
    ``ConfigError`` if its stages share any other parameter, or ``ValueError`` if none has one.
    """
    groups = fqns_by_parameter(model)
    if not is_outside:
        # Embedding and output.
        return [first for first, *others in groups if others]
    stages, owners = list[nn.Module](), defaultdict[str, list[int]](list)
    for index, own_layers in enumerate(_layers_of_stages(model, pp, split, parallelism)):
        stages.append(deepcopy(model))
        split.split_stage(stages[-1], own_layers)
        for fqn, _ in stages[-1].named_parameters(remove_duplicate=False):
            owners[fqn].append(index)
    tied, ends = [], [stages[0], stages[-1]]
    for fqns in groups:
        indices = sorted({index for fqn in fqns for index in owners[fqn]})
        if not indices:
            raise ValueError(f"split_stage leaves {' = '.join(fqns)} on no stage")
        if len(indices) == 1:
            continue
        is_of_ends = len(fqns) > 1 and indices == [0, len(stages) - 1]
        if not is_of_ends or not _have(fqns[0], model, split, ends):
            text = f"{' = '.join(fqns)} is on stages {', '.join(map(str, indices))}"
            remedy = "split_stage must leave it on one, or each block have one of its own"
            text = f"{text}, which would train it apart: {remedy}"
            raise ConfigError([f"parallelism.pipeline_parallel_degree: {text}"])
        tied.append(fqns[0])
    return tied


def _have(fqn: str, model: nn.Module, split: PipelineSplit, stages: list[nn.Module]) -> bool:
    """True if a model of each of the ``stages`` alone has a parameter ``fqn``."""
    for stage in stages:
        merged = deepcopy(model)
        split.merge_stages(merged, [deepcopy(stage)])
        if fqn not in dict(merged.named_parameters()):
            return False
    return True


def _layers_of_stages(
    model: nn.Module, pp: int, split: PipelineSplit, parallelism: Parallelism
) -> list[range]:
    return stage_layers(
        len(split.blocks(model)),
        pp * stages_per_rank(parallelism),
        less_first=parallelism.pipeline_parallel_first_stage_less_layers,
        less_last=parallelism.pipeline_parallel_last_stage_less_layers,
    )


def stages_per_rank(parallelism: Parallelism) -> int:
    """Number of stages on each rank: 1 unless the schedule is interleaved."""
    is_interleaved = parallelism.pipeline_parallel_schedule.startswith("Interleaved")
    return parallelism.pipeline_parallel_stages_per_rank if is_interleaved else 1


def stage_layers(n_layers: int, n_stages: int, *, less_first: int, less_last: int) -> list[range]:
    """Layer indices of each stage: at least one layer, and as balanced as possible.

    The embedding counts as ``less_first`` layers, the output as ``less_last``.
    """
    assert n_stages <= n_layers, "more stages than layers"
    counts, weights = [1] * n_stages, [1] * n_stages
    weights[0] += less_first
    weights[-1] += less_last
    for _ in range(n_layers - n_stages):
        # Ties go to the last stage, because late stages store activations of fewer microbatches.
        lightest = min(reversed(range(n_stages)), key=weights.__getitem__)
        counts[lightest] += 1
        weights[lightest] += 1
    starts = [sum(counts[:index]) for index in range(n_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def build_pipeline_schedule(
    stages: list[nn.Module],
    pp_mesh: DeviceMesh,
    *,
    parallelism: Parallelism,
    device: torch.device,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    n_microbatches: int,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
    is_training: bool,
) -> Any:
    """Build PyTorch's schedule over ``stages``; forward only unless ``is_training``.

    Meta tensors of one microbatch: ``tokens`` (b, s) enters the first stage, ``hidden`` (b, s, d)
    is sent between stages (s is divided by tp), ``logits`` (b, s, v) leaves the last.
    Losses and gradients are summed over microbatches, never averaged.
    """
    # This import takes half a second, so only pipelines pay for it.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    is_interleaved, group = len(stages) > 1, pp_mesh.get_group()
    schedule_name: str = parallelism.pipeline_parallel_schedule
    if not is_training:
        schedule_name = "LoopedBFS" if is_interleaved else "GPipe"
    n_stages = pp_mesh.size() * len(stages)
    local = []
    for stage, index in zip(stages, _stage_indices(pp_mesh, n_stages), strict=True):
        # Without these shapes, PyTorch would run each stage to infer them.
        input_ = tokens if index == 0 else hidden
        output = logits if index == n_stages - 1 else hidden
        local.append(PipelineStage(stage, index, n_stages, device, input_, output, group=group))
    schedule_cls = get_schedule_class(schedule_name)
    return schedule_cls(
        local if is_interleaved else local[0], n_microbatches, loss_fn=loss_fn, scale_grads=False
    )


@torch.no_grad()
def all_reduce_tied_gradients(parameters: list[nn.Parameter], pp_mesh: DeviceMesh) -> None:
    """Sum the gradients of parameters that the first and the last stage share. Collective.

    Mutates the gradients.
    """
    peers = (0, pp_mesh.size() - 1)
    if pp_mesh.get_local_rank() not in peers:
        return
    (other,) = set(peers) - {pp_mesh.get_local_rank()}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, "a tied weight took no part in the loss"
        local = to_local(parameter.grad)
        received = torch.empty_like(local)
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, local, group=pp_mesh.get_group(), group_peer=other),
                dist.P2POp(dist.irecv, received, group=pp_mesh.get_group(), group_peer=other),
            ]
        ):
            work.wait()
        local.add_(received)


def _stage_indices(pp_mesh: DeviceMesh, n_stages: int) -> range:
    """Indices of this rank's stages, assigned round-robin."""
    return range(pp_mesh.get_local_rank(), n_stages, pp_mesh.size())
