"""A step's microbatches through the model, forward and backward: the inside of the loop."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from config.job_config import Compile, Parallelism
from data.loader import Batch
from optim.loss import cross_entropy_sum
from parallelisms.context_parallel import sequence_part, whole_sequence
from parallelisms.elastic import GradientTree
from parallelisms.gradient_reduction import begin_microbatch
from parallelisms.parallel_dims import ParallelDims
from parallelisms.pipeline_parallel import build_schedule, sum_tied


class Runner(Protocol):
    """How batches go through the model on this rank."""

    copies: list[nn.Parameter]
    """Parameters of this rank that another stage counts as its own."""

    def train(self, microbatches: list[Batch], n_tokens: int) -> torch.Tensor:
        """Forward and backward; this rank's part of the step's loss, by microbatch (n,).

        ``n_tokens``: labels that count in the whole step, by which the loss is divided.
        """

    def evaluate(self, batches: list[Batch]) -> torch.Tensor:
        """This rank's part of the cross entropy, summed over tokens, by batch (n,)."""

    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits (b, s, vocab_size), whole on each rank."""


def build_runner(
    model: nn.Module,
    stages: list[nn.Module],
    dims: ParallelDims,
    *,
    parallelism: Parallelism,
    compile: Compile,
    mp_policy: MixedPrecisionPolicy,
    device: torch.device,
    tied: list[str],
    tree: GradientTree | None = None,
) -> Runner:
    """Build the runner of ``model`` as ``parallelize`` left it.

    ``tied``: FQNs of parameters that had several names in the whole model. ``tree``: sums the
    gradients of microbatches in its own order.
    """
    if dims.degrees.pp == 1:
        return WholeModel(
            model, dims.cp_mesh, parallelism=parallelism, compile=compile, device=device, tree=tree
        )
    return Pipeline(
        model,
        stages,
        dims,
        parallelism=parallelism,
        compile=compile,
        mp_policy=mp_policy,
        device=device,
        tied=tied,
    )


class WholeModel:
    """Every rank has all layers, in full or a shard of each."""

    def __init__(
        self,
        model: nn.Module,
        cp_mesh: DeviceMesh | None = None,
        *,
        parallelism: Parallelism,
        device: torch.device,
        compile: Compile | None = None,
        tree: GradientTree | None = None,
    ) -> None:
        self._model, self._parallelism, self._tree = model, parallelism, tree
        self._compile = compile
        self._parts = _SequenceParts(cp_mesh, parallelism, device)
        self.copies: list[nn.Parameter] = []

    def train(self, microbatches: list[Batch], n_tokens: int) -> torch.Tensor:
        losses = []
        for batch in microbatches:
            is_last = batch is microbatches[-1]
            begin_microbatch(self._model, self._parallelism, is_last=is_last)
            # A step in which no label counts has a loss of 0.
            loss = self._loss(batch, max(n_tokens, 1))
            loss.backward()
            if self._tree is not None:
                self._tree.end_microbatch(is_last=is_last)
            losses.append(loss.detach())
        return torch.stack(losses)

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> torch.Tensor:
        return torch.stack([self._loss(batch, 1) for batch in batches])

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        tokens, options = self._parts.inputs(*batch.inputs)
        return self._parts.whole(self._model(tokens, **options))

    def _loss(self, batch: Batch, n_tokens: int) -> torch.Tensor:
        tokens, options = self._parts.inputs(*batch.inputs)
        labels = self._parts.own(batch.labels)
        return cross_entropy_sum(self._model(tokens, **options), labels, n_tokens, self._compile)


class Pipeline:
    """Every rank has some layers, which microbatches pass in the order of a schedule."""

    def __init__(
        self,
        model: nn.Module,
        stages: list[nn.Module],
        dims: ParallelDims,
        *,
        parallelism: Parallelism,
        compile: Compile,
        mp_policy: MixedPrecisionPolicy,
        device: torch.device,
        tied: list[str],
    ) -> None:
        """``tied``: FQNs of parameters that the first and the last stage share."""
        self._stages, self._dims, self._parallelism = stages, dims, parallelism
        self._args, self._compile, self._device = cast(Any, model).args, compile, device
        assert mp_policy.param_dtype is not None
        self._dtype = mp_policy.param_dtype
        self._loss_dtype = torch.promote_types(self._dtype, torch.float32)
        self._n_tokens = 1
        # Later stages see hidden states, which do not tell how long the sequence is.
        self._parts = _SequenceParts(dims.cp_mesh, parallelism, device, needs_positions=True)
        self._tied = [p for fqn, p in model.named_parameters() if fqn in tied]
        self.copies = self._tied if dims.pp_mesh.get_local_rank() > 0 else []
        self._training: dict[tuple[torch.Size, int], Any] = {}
        """The newest schedule for training, by the shape and number of its microbatches."""
        # The first operation of a group is undefined unless all of its ranks take part.
        dist.all_reduce(torch.zeros(1, device=device), group=dims.pp_mesh.get_group())

    def train(self, microbatches: list[Batch], n_tokens: int) -> torch.Tensor:
        # A step in which no label counts has a loss of 0.
        self._n_tokens = max(n_tokens, 1)
        key = (microbatches[0].tokens.shape, len(microbatches))
        if key not in self._training:
            # One alone: each keeps what it receives into, and phases of a ramp do not come back.
            self._training = {key: self._build(*key, self._loss, is_training=True)}
        losses = self._losses(self._training[key].step, microbatches)
        sum_tied(self._tied, self._dims.pp_mesh)
        return losses

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> torch.Tensor:
        self._n_tokens, n = 1, len(self._stages) * self._dims.pp_mesh.size()
        # Groups share a schedule, for a new one has FSDP free what is gathered; it ends with this
        # call, for it keeps its last outputs.
        schedules: dict[tuple[torch.Size, int], Any] = {}
        losses = []
        # Just enough at once to fill the pipeline: a schedule keeps each stage's outputs of all.
        for start in range(0, len(batches), n):
            group = batches[start : start + n]
            key = (group[0].tokens.shape, len(group))
            if key not in schedules:
                schedules[key] = self._build(*key, self._loss)
            losses.append(self._losses(schedules[key].eval, group))
        return torch.cat(losses)

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        tokens, options = self._inputs([batch])
        found = self._build(batch.tokens.shape, 1, None).step(tokens, **options)
        shape = (*tokens.shape, self._args.vocab_size)
        logits = torch.empty(shape, dtype=self._dtype, device=self._device)
        if found is not None:
            logits.copy_(found.full_tensor() if isinstance(found, DTensor) else found)
        group = self._dims.pp_mesh.get_group()
        dist.broadcast(logits, group=group, group_src=self._dims.pp_mesh.size() - 1)
        return self._parts.whole(logits)

    def _losses(self, run: Callable[..., object], microbatches: list[Batch]) -> torch.Tensor:
        """Each microbatch's loss (n,); zeros except on ranks of the last stage."""
        tokens, options = self._inputs(microbatches)
        labels = self._parts.own(self._join([batch.labels for batch in microbatches]))
        losses: list[torch.Tensor] = []
        run(tokens, target=labels, losses=losses, return_outputs=False, **options)
        if losses:
            return torch.stack(losses).detach()
        return torch.zeros(len(microbatches), dtype=self._loss_dtype, device=self._device)

    def _inputs(self, microbatches: list[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The model's inputs for all microbatches, joined; the schedule splits them again."""
        tokens = self._join([batch.tokens for batch in microbatches])
        positions, document_ids = (
            None if each[0] is None else self._join(each)
            for each in zip(*(batch.inputs[1:] for batch in microbatches), strict=True)
        )
        return self._parts.inputs(tokens, positions, document_ids)

    def _join(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.to(self._device, non_blocking=True) for part in parts])

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy_sum(logits, labels, self._n_tokens, self._compile)

    def _build(
        self,
        shape: torch.Size,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None,
        *,
        is_training: bool = False,
    ) -> Any:
        """A schedule for microbatches of this ``shape`` (b, s)."""
        (rows, seq_len), degrees = shape, self._dims.degrees
        hidden_shape = (rows, seq_len // degrees.cp // degrees.tp, self._args.dim)
        logits_shape = (rows, seq_len // degrees.cp, self._args.vocab_size)
        with torch.device("meta"):
            tokens = torch.empty((rows, seq_len // degrees.cp), dtype=torch.int64)
            hidden = torch.empty(hidden_shape, dtype=self._dtype, requires_grad=is_training)
            logits = torch.empty(logits_shape, dtype=self._dtype)
        return build_schedule(
            self._stages,
            self._dims.pp_mesh,
            parallelism=self._parallelism,
            device=self._device,
            tokens=tokens,
            hidden=hidden,
            logits=logits,
            n_microbatches=n_microbatches,
            loss_fn=loss_fn,
            is_training=is_training,
        )


class _SequenceParts:
    """Which part of each sequence is this rank's, and how ranks' parts become whole again."""

    def __init__(
        self,
        cp_mesh: DeviceMesh | None,
        parallelism: Parallelism,
        device: torch.device,
        *,
        needs_positions: bool = False,
    ) -> None:
        self._mesh = None if cp_mesh is None or cp_mesh.size() == 1 else cp_mesh
        self._method, self._device = parallelism.context_parallel_method, device
        self._needs_positions = needs_positions or self._mesh is not None

    def inputs(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The model's inputs: (b, s/cp), but document_ids (b, s), which attention needs whole."""
        options = {}
        if positions is None and self._needs_positions:
            positions = torch.arange(tokens.shape[1], device=self._device).expand(tokens.shape)
        if positions is not None:
            options["positions"] = self.own(positions)
        if document_ids is not None:
            options["document_ids"] = document_ids.to(self._device, non_blocking=True)
        return self.own(tokens), options

    def own(self, sequences: torch.Tensor) -> torch.Tensor:
        """(b, s) to this rank's (b, s/cp), on the device."""
        # Copied first: a slice made on the host is not in pinned memory, and its copy would block.
        sequences = sequences.to(self._device, non_blocking=True)
        if self._mesh is not None:
            own = sequence_part(sequences.shape[1], self._mesh, self._device, method=self._method)
            sequences = sequences[:, own]
        return sequences

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (b, s/cp, vocab_size / tp) to (b, s, vocab_size)."""
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        if self._mesh is not None:
            logits = whole_sequence(logits, self._mesh, method=self._method)
        return logits
