"""The optimizer step: forward, backward, clipping, the update, and the router bias."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch

from build_model import ShardedModel
from data.step_batches import StepBatch
from metrics.layer_stats import LayerStats
from optim.grad_norm import clip_grad_norm_, local_norms
from optim.muon import hidden_matrices
from optim.nonfinite import NonfiniteGuard
from optim.optimizer import build_optimizer
from optim.router_bias import ExpertBalancer
from run_spec import RunSpec


class StepResult(NamedTuple):
    """Values of one optimizer step."""

    losses: torch.Tensor
    """Loss of each microbatch on this rank (n,); see ``ModelRunner.forward_backward``."""
    grad_norm: torch.Tensor
    """Global gradient norm before clipping, 0-d; on the device, like the losses."""
    lr: float
    layers: dict[str, float]
    """Statistics of layers, on steps of ``metrics.layer_stats_freq``; else {}."""


class TrainStep:
    """Updates the weights of ``model`` by one batch per call. Owns the optimizer."""

    def __init__(self, run: RunSpec, model: ShardedModel) -> None:
        """Collective."""
        spec, module, dims, config = model.spec, model.module, model.dims, run.config
        self._run, self._dims = run, dims
        self._parameters = list(module.parameters())
        moes = spec.moes(module)
        self.runner = model.runner()
        self.optimizer = build_optimizer(
            module,
            config.optimizer,
            matrices=hidden_matrices(spec.blocks(module), moes),
            weight_mesh=dims.weight_mesh,
            is_elastic=config.debug.is_elastic,
        )
        self.nonfinite = NonfiniteGuard(
            self.optimizer,
            dict(module.named_parameters()),
            fqns=model.fqns,
            weight_mesh=dims.weight_mesh,
            config=config.numerics,
        )
        self._expert_balancer = ExpertBalancer(
            moes, dims.data_mesh, rate=config.experts.balance_bias_rate, device=model.device
        )
        self._layer_stats = LayerStats(
            module,
            spec,
            fqns=model.fqns,
            data_mesh=dims.data_mesh,
            freq=config.metrics.layer_stats_freq,
            compiled=model.stages if config.compile.enable else [],
        )
        # Also where this pipeline stage has none: their metrics are collective.
        self._has_moes = model.has_moes

    def __call__(self, step: int, batch: StepBatch) -> StepResult:
        """Make optimizer step ``step``, 1-based. Collective.

        Never waits for the device, unless ``NonfiniteGuard.step`` does.
        """
        run, config = self._run, self._run.config
        self._expert_balancer.set_batch_fraction(batch.n_sequences / run.global_batch_size)
        activations = self._observe_forward(step, batch)
        losses = self.runner.forward_backward(batch.microbatches, batch.n_tokens)
        norms = local_norms(self._parameters)
        grad_norm = clip_grad_norm_(
            self._parameters,
            config.training.max_norm,
            norms=norms,
            is_exact=config.debug.is_elastic,
            pp_mesh=self._dims.pp_mesh,
            tied_duplicates=self.runner.tied_duplicates,
        )
        lr = config.optimizer.lr * run.lr_factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.nonfinite.update_found_inf(step, loss=losses.sum(), norms=norms, grad_norm=grad_norm)
        with self._observed_update(step, norms) as layers:
            self.nonfinite.step()
        self.optimizer.zero_grad()
        self._expert_balancer.update(self.nonfinite.found_inf)
        return StepResult(losses, grad_norm, lr, activations | layers)

    def _observe_forward(self, step: int, batch: StepBatch) -> dict[str, float]:
        """Return statistics of layers of one more forward pass, if they are due."""
        if not self._layer_stats.is_due(step):
            return {}
        return self._layer_stats.observe_forward(partial(self.runner.evaluate, batch.microbatches))

    def _observed_update(
        self, step: int, norms: list[torch.Tensor]
    ) -> AbstractContextManager[dict[str, float]]:
        """Context of the update, which fills in statistics of layers if they are due."""
        if not self._layer_stats.is_due(step):
            return nullcontext({})
        return self._layer_stats.observe_update(norms, self.runner.tied_duplicates)

    def metrics(self) -> dict[str, float]:
        """Return the expert load of the last step and the updates skipped so far. Collective."""
        load = self._expert_balancer.max_load_ratio() if self._has_moes else {}
        return {**load, "skipped_steps": self.nonfinite.skipped}
