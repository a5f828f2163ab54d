"""Run microbatches forward and backward: through a whole model, or a pipeline of stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from config.job_config import Compile, Parallelism
from cuda_graphs import GraphPool, Inputs, MicrobatchGraphs, run_step
from data.loader import Microbatch
from optim.loss import cross_entropy_sum
from parallelisms.context_parallel import SequenceSharder
from parallelisms.elastic import PairwiseGradientAccumulator
from parallelisms.fsdp import FSDPPolicy, reshard, set_gradient_sync
from parallelisms.parallel_dims import ParallelDims
from parallelisms.pipeline_parallel import all_reduce_tied_gradients, build_pipeline_schedule


class ModelRunner(Protocol):
    """Runs the model on this rank's microbatches. All methods are collective."""

    tied_duplicates: list[nn.Parameter]
    """Tied parameters of this rank that an earlier stage has too, and whose norm it counts."""

    @property
    def capture_id(self) -> int | None:
        """Number of the capture in whose memory the gradients are; None if they are elsewhere."""

    def forward_backward(self, microbatches: list[Microbatch], n_tokens: int) -> torch.Tensor:
        """Accumulate gradients; return the loss of each microbatch on this rank (n,).

        Summed over microbatches and over pp, cp and batch ranks it is the step's loss; tp ranks
        have equal values. ``n_tokens``: target tokens of the whole step, at least 1, by which it
        is divided.
        """

    def evaluate(self, microbatches: list[Microbatch]) -> torch.Tensor:
        """Return the summed cross entropy of each microbatch on this rank (n,), ranks as above."""

    def logits(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the logits (b, s, vocab_size), unsharded on every rank."""

    def reset_graphs(self) -> None:
        """Free all CUDA graphs. Call after loading, and before the process group is destroyed."""


class SPMDRunner:
    """Runs a model of which every rank has all layers, sharded or not."""

    def __init__(
        self,
        model: nn.Module,
        cp_mesh: DeviceMesh | None = None,
        *,
        parallelism: Parallelism,
        device: torch.device,
        compile: Compile | None = None,
        accumulator: PairwiseGradientAccumulator | None = None,
        may_skip_layers: bool = False,
        graph_pool: GraphPool | None = None,
    ) -> None:
        """``may_skip_layers``: not every microbatch uses every weight. ``graph_pool``: microbatches
        run as graphs."""
        self._model, self._accumulator = model, accumulator
        self._policy = FSDPPolicy.of(parallelism, may_skip_layers=may_skip_layers)
        self._compile, self._device = compile, device
        self._sharder = SequenceSharder(cp_mesh, parallelism, device)
        self.tied_duplicates: list[nn.Parameter] = []
        self._graphs: MicrobatchGraphs | None = None
        if graph_pool is not None:
            parameters = list(model.parameters())
            self._graphs = MicrobatchGraphs(self._run_microbatch, parameters, graph_pool)

    @property
    def capture_id(self) -> int | None:
        return None if self._graphs is None else self._graphs.capture_id

    def forward_backward(self, microbatches: list[Microbatch], n_tokens: int) -> torch.Tensor:
        divisor = torch.full((), n_tokens, dtype=torch.float64, device=self._device)
        inputs = [(*self._place(each), divisor) for each in microbatches]
        run = self._graphs or partial(run_step, self._run_microbatch)
        return torch.stack(run(inputs))

    @torch.no_grad()
    def evaluate(self, microbatches: list[Microbatch]) -> torch.Tensor:
        with _eval_mode(self._model):
            losses = torch.stack([self._loss(self._place(each), 1) for each in microbatches])
        self._end_inference()
        return losses

    @torch.no_grad()
    def logits(self, microbatch: Microbatch) -> torch.Tensor:
        tokens, options = self._sharder.inputs(*microbatch.inputs)
        with _eval_mode(self._model):
            logits = self._sharder.unshard(self._model(tokens, **options))
        self._end_inference()
        return logits

    def _end_inference(self) -> None:
        """Free the last unit's weights, as the next backward does unless it is a replay."""
        if self._graphs is not None:
            reshard(self._model)

    def reset_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.reset()

    def _place(self, batch: Microbatch) -> Inputs:
        """This rank's tokens, labels, positions and document ids, on the device."""
        tokens, options = self._sharder.inputs(*batch.inputs)
        labels = self._sharder.shard(batch.labels)
        return tokens, labels, options.get("positions"), options.get("document_ids")

    def _run_microbatch(self, inputs: Inputs, *, is_last: bool) -> torch.Tensor:
        set_gradient_sync(self._model, self._policy, is_last=is_last)
        *placed, divisor = inputs
        assert divisor is not None
        loss = self._loss(placed, divisor)
        loss.backward()
        if self._accumulator is not None:
            self._accumulator.end_microbatch(is_last=is_last)
        return loss.detach()

    def _loss(
        self, inputs: Sequence[torch.Tensor | None], divisor: float | torch.Tensor
    ) -> torch.Tensor:
        tokens, labels, positions, document_ids = inputs
        assert labels is not None
        options = {"positions": positions, "document_ids": document_ids}
        given = {name: tensor for name, tensor in options.items() if tensor is not None}
        return cross_entropy_sum(self._model(tokens, **given), labels, divisor, self._compile)


class PipelineRunner:
    """Runs the stages of a pipeline by one of PyTorch's schedules."""

    capture_id = None

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
        """``tied``: FQNs of parameters that the first and the last stage share. Collective."""
        self._stages, self._dims, self._parallelism = stages, dims, parallelism
        self._args, self._compile, self._device = cast(Any, model).args, compile, device
        assert mp_policy.param_dtype is not None
        self._dtype = mp_policy.param_dtype
        self._loss_dtype = torch.promote_types(self._dtype, torch.float32)
        self._n_tokens = 1
        # Later stages receive hidden states, from which the sequence length cannot be read.
        self._sharder = SequenceSharder(dims.cp_mesh, parallelism, device, needs_positions=True)
        self._tied = [p for fqn, p in model.named_parameters() if fqn in tied]
        self.tied_duplicates = self._tied if dims.pp_mesh.get_local_rank() > 0 else []
        self._training: dict[tuple[torch.Size, int], Any] = {}
        """The latest training schedule, by the shape and number of its microbatches."""
        # P2P as the first operation of a group hangs unless all of its ranks take part.
        dist.all_reduce(torch.zeros(1, device=device), group=dims.pp_mesh.get_group())

    def forward_backward(self, microbatches: list[Microbatch], n_tokens: int) -> torch.Tensor:
        self._n_tokens = n_tokens
        key = (microbatches[0].tokens.shape, len(microbatches))
        if key not in self._training:
            # Only one: a schedule keeps its receive buffers, and phases of a ramp do not return.
            self._training = {key: self._build(*key, self._loss, is_training=True)}
        losses = self._losses(self._training[key].step, microbatches)
        all_reduce_tied_gradients(self._tied, self._dims.pp_mesh)
        return losses

    def reset_graphs(self) -> None:
        """Do nothing: pipelines run without CUDA graphs."""

    @torch.no_grad()
    def evaluate(self, microbatches: list[Microbatch]) -> torch.Tensor:
        self._n_tokens, n = 1, len(self._stages) * self._dims.pp_mesh.size()
        # Groups share a schedule, because a new one makes FSDP reshard. It goes after this call,
        # because it keeps its last outputs.
        schedules: dict[tuple[torch.Size, int], Any] = {}
        losses = []
        # Just enough to fill the pipeline: a schedule keeps every stage's outputs of all.
        for start in range(0, len(microbatches), n):
            group = microbatches[start : start + n]
            key = (group[0].tokens.shape, len(group))
            if key not in schedules:
                schedules[key] = self._build(*key, self._loss)
            with _eval_mode(*self._stages):
                losses.append(self._losses(schedules[key].eval, group))
        return torch.cat(losses)

    @torch.no_grad()
    def logits(self, microbatch: Microbatch) -> torch.Tensor:
        tokens, options = self._inputs([microbatch])
        schedule = self._build(microbatch.tokens.shape, 1, None)
        with _eval_mode(*self._stages):
            found = schedule.step(tokens, **options)
        shape = (*tokens.shape, self._args.vocab_size)
        logits = torch.empty(shape, dtype=self._dtype, device=self._device)
        if found is not None:
            logits.copy_(found.full_tensor() if isinstance(found, DTensor) else found)
        group = self._dims.pp_mesh.get_group()
        dist.broadcast(logits, group=group, group_src=self._dims.pp_mesh.size() - 1)
        return self._sharder.unshard(logits)

    def _losses(self, run: Callable[..., object], microbatches: list[Microbatch]) -> torch.Tensor:
        """Return each microbatch's loss (n,); zeros except on ranks of the last stage."""
        tokens, options = self._inputs(microbatches)
        labels = self._sharder.shard(self._concatenate([batch.labels for batch in microbatches]))
        losses: list[torch.Tensor] = []
        run(tokens, target=labels, losses=losses, return_outputs=False, **options)
        if losses:
            return torch.stack(losses).detach()
        return torch.zeros(len(microbatches), dtype=self._loss_dtype, device=self._device)

    def _inputs(
        self, microbatches: list[Microbatch]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Concatenate the inputs of all microbatches, which the schedule splits again."""
        tokens = self._concatenate([batch.tokens for batch in microbatches])
        positions, document_ids = (
            None if each[0] is None else self._concatenate(each)
            for each in zip(*(batch.inputs[1:] for batch in microbatches), strict=True)
        )
        return self._sharder.inputs(tokens, positions, document_ids)

    def _concatenate(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
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
        """Build a schedule for microbatches of ``shape`` (b, s)."""
        (rows, seq_len), degrees = shape, self._dims.degrees
        hidden_shape = (rows, seq_len // degrees.cp // degrees.tp, self._args.dim)
        logits_shape = (rows, seq_len // degrees.cp, self._args.vocab_size)
        with torch.device("meta"):
            tokens = torch.empty((rows, seq_len // degrees.cp), dtype=torch.int64)
            hidden = torch.empty(hidden_shape, dtype=self._dtype, requires_grad=is_training)
            logits = torch.empty(logits_shape, dtype=self._dtype)
        return build_pipeline_schedule(
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


@contextmanager
def _eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Turn off dropout and what else is for training only. Mutates the modules meanwhile.

    Compiled graphs are specific to it, as they are to ``torch.no_grad``: together, no more graphs.
    """
    # A model may keep parts of it in eval mode, such as frozen ones.
    trained = [part for module in modules for part in module.modules() if part.training]
    for part in trained:
        part.training = False
    try:
        yield
    finally:
        for part in trained:
            part.training = True
