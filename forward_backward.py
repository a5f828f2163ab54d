"""A step's microbatches through the model, forward and backward: the inside of the loop."""

from itertools import islice

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from config.job_config import Parallelism
from data.loader import Batch, BatchLoader
from optim.loss import IGNORED, cross_entropy_sum
from parallelisms.elastic import GradientTree
from parallelisms.gradient_reduction import begin_microbatch
from runtime.distributed import sum_in_order, sum_over


def take_step(loader: BatchLoader) -> tuple[list[Batch], Exception | None]:
    """The microbatches of a step, or what is wrong with the data (ValueError) or with reading."""
    try:
        return list(islice(loader, loader.microbatches)), None
    except (ValueError, OSError) as error:
        return [], error


def run_model(
    model: nn.Module,
    device: torch.device,
    parallelism: Parallelism,
    microbatches: list[Batch],
    n_tokens: int,
    *,
    tree: GradientTree | None = None,
) -> torch.Tensor:
    """Forward and backward of each microbatch; this rank's parts of the step's loss, one each."""
    losses = []
    for batch in microbatches:
        is_last = batch is microbatches[-1]
        begin_microbatch(model, parallelism, is_last=is_last)
        # A step in which no label counts has a loss of 0.
        loss = loss_sum(model, batch, device) / max(n_tokens, 1)
        loss.backward()
        if tree is not None:
            tree.end_microbatch(is_last=is_last)
        losses.append(loss.detach())
    return torch.stack(losses)


def loss_sum(model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    logits = model(*(t if t is None else t.to(device, non_blocking=True) for t in batch.inputs))
    return cross_entropy_sum(logits, batch.labels.to(device, non_blocking=True))


def count_valid(microbatches: list[Batch]) -> int:
    """Labels of this rank that count."""
    return sum(int((batch.labels != IGNORED).sum()) for batch in microbatches)


@torch.no_grad()
def validation_loss(
    model: nn.Module, batches: list[Batch], device: torch.device, batch_mesh: DeviceMesh
) -> float:
    """Cross entropy in nats per held-out token, over all ranks."""
    losses = torch.stack([loss_sum(model, batch, device) for batch in batches])
    n_tokens = sum_over(torch.tensor(count_valid(batches)), batch_mesh)
    return sum_in_order(losses, batch_mesh).item() / int(n_tokens)
