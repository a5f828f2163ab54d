"""Pipeline parallel: each rank has some of the layers, and microbatches travel through them."""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from config.job_config import Parallelism
from runtime.distributed import local_part
from runtime.log import logger


class Cuts(Protocol):
    """What a model says about its stages; ``models.ModelSpec`` has it."""

    @property
    def blocks(self) -> Callable[[Any], nn.ModuleDict]: ...
    @property
    def cut_stage(self) -> Callable[[Any, range], None]: ...
    @property
    def join_stages(self) -> Callable[[Any, list[Any]], None]: ...


def apply_pipeline_parallel(
    model: nn.Module,
    pp_mesh: DeviceMesh,
    *,
    cuts: Cuts,
    parallelism: Parallelism,
    parallelize_stage: Callable[[nn.Module], None],
) -> list[nn.Module]:
    """Cut ``model``, still on the meta device; return the stages of this rank, in order.

    ``parallelize_stage`` treats each like a whole model. Mutates ``model``: it
    keeps, under the same names, the parameters of these stages, and cannot be called any more.
    """
    n_stages = pp_mesh.size() * stages_per_rank(parallelism)
    layers = stage_layers(
        len(cuts.blocks(model)),
        n_stages,
        less_first=parallelism.pipeline_parallel_first_stage_less_layers,
        less_last=parallelism.pipeline_parallel_last_stage_less_layers,
    )
    stages = []
    for index in _stage_indices(pp_mesh, n_stages):
        stage = deepcopy(model)
        cuts.cut_stage(stage, layers[index])
        parallelize_stage(stage)
        stages.append(stage)
    cuts.join_stages(model, stages)
    logger.info("pipeline parallel: %d ranks, stages of %s layers, %s", pp_mesh.size(),
                [len(own) for own in layers], parallelism.pipeline_parallel_schedule)  # fmt: skip
    return stages


def stages_per_rank(parallelism: Parallelism) -> int:
    is_interleaved = parallelism.pipeline_parallel_schedule.startswith("Interleaved")
    return parallelism.pipeline_parallel_stages_per_rank if is_interleaved else 1


def stage_layers(n_layers: int, n_stages: int, *, less_first: int, less_last: int) -> list[range]:
    """The layers of each stage: at least one, and as even as can be.

    Embedding and output count as ``less_first`` and ``less_last`` layers.
    """
    assert n_stages <= n_layers, "a stage without layers"
    counts, weights = [1] * n_stages, [1] * n_stages
    weights[0] += less_first
    weights[-1] += less_last
    for _ in range(n_layers - n_stages):
        # Of equals the last: late stages keep fewer microbatches' activations.
        lightest = min(reversed(range(n_stages)), key=weights.__getitem__)
        counts[lightest] += 1
        weights[lightest] += 1
    starts = [sum(counts[:index]) for index in range(n_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def build_schedule(
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
    """PyTorch's schedule over ``stages``; one that is not for training only goes forward.

    ``tokens``, ``hidden``, ``logits``: on the meta device, what the first stage takes, what travels
    and what the last stage returns for one microbatch. Losses and gradients are summed over
    microbatches, never averaged.
    """
    # An import of half a second: only pipelines have to wait for it.
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    is_interleaved, group = len(stages) > 1, pp_mesh.get_group()
    kind: str = parallelism.pipeline_parallel_schedule
    if not is_training:
        kind = "LoopedBFS" if is_interleaved else "GPipe"
    n_stages = pp_mesh.size() * len(stages)
    own = []
    for stage, index in zip(stages, _stage_indices(pp_mesh, n_stages), strict=True):
        # PyTorch is told what travels, or it would run each stage to see.
        input_ = tokens if index == 0 else hidden
        output = logits if index == n_stages - 1 else hidden
        own.append(PipelineStage(stage, index, n_stages, device, input_, output, group=group))
    schedule_cls = get_schedule_class(kind)
    return schedule_cls(
        own if is_interleaved else own[0], n_microbatches, loss_fn=loss_fn, scale_grads=False
    )


@torch.no_grad()
def sum_tied(parameters: list[nn.Parameter], pp_mesh: DeviceMesh) -> None:
    """Add up, in place, the gradients of parameters that the first and the last stage both have."""
    peers = (0, pp_mesh.size() - 1)
    if pp_mesh.get_local_rank() not in peers:
        return
    (other,) = set(peers) - {pp_mesh.get_local_rank()}
    for parameter in parameters:
        assert parameter.grad is not None
        local = local_part(parameter.grad)
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
    """Stages are dealt out to the ranks in turn."""
    return range(pp_mesh.get_local_rank(), n_stages, pp_mesh.size())
