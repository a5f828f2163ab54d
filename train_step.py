"""The optimizer step: forward, backward, clipping, the update, and the router bias."""

from functools import partial
from typing import NamedTuple

import torch

from build_model import ShardedModel
from cuda_graphs import UpdateGraph
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
        self._run, self.model = run, model
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
        # Muon and optimizers of your own take numbers from the host in each step.
        pool = model.graph_pool() if config.optimizer.name == "adamw" else None
        self._graph = None if pool is None else UpdateGraph(self._update, pool)

    def __call__(self, step: int, batch: StepBatch) -> StepResult:
        """Make optimizer step ``step``, 1-based. Collective.

        Waits for the device only where ``NonfiniteGuard.step`` does, where statistics of layers are
        observed, with CPU offload, and where sizes depend on tokens: with expert parallel, and in
        MoE layers without grouped matmuls.
        """
        run, config = self._run, self._run.config
        self._expert_balancer.set_batch_fraction(batch.n_sequences / run.global_batch_size)
        is_observed = self._layer_stats.is_due(step)
        layers: dict[str, float] = {}
        if is_observed:
            evaluate = partial(self.runner.evaluate, batch.microbatches)
            layers |= self._layer_stats.observe_forward(evaluate)
        losses = self.runner.forward_backward(batch.microbatches, batch.n_tokens)
        lr = config.optimizer.lr * run.lr_factor(step)
        update = partial(self._update, layers=layers) if is_observed else self._run_update
        # The same number for graphs, which read it from a float32 tensor, and for all other steps.
        grad_norm = update(losses.sum(), torch.tensor(lr, dtype=torch.float32).item(), step)
        self.optimizer.zero_grad()
        self._expert_balancer.update(self.nonfinite.found_inf)
        return StepResult(losses, grad_norm, lr, layers)

    def reset_graphs(self) -> None:
        """Free all CUDA graphs, as ``ModelRunner.reset_graphs`` does."""
        self.runner.reset_graphs()
        if self._graph is not None:
            self._graph.reset()

    def _run_update(self, loss: torch.Tensor, lr: float, step: int) -> torch.Tensor:
        """``_update``, as a graph if there is one."""
        if self._graph is None:
            return self._update(loss, lr, step)
        # A graph would repeat numbers. PyTorch's AdamW reads a learning rate of float32.
        lr_tensor = torch.full((), lr, dtype=torch.float32, device=loss.device)
        step_tensor = torch.full((), step, device=loss.device)
        grad_norm = self._graph(self.runner.capture_id, loss, lr_tensor, step_tensor)
        self._set_lr(lr)
        return grad_norm

    def _update(
        self,
        loss: torch.Tensor,
        lr: float | torch.Tensor,
        step: int | torch.Tensor,
        layers: dict[str, float] | None = None,
    ) -> torch.Tensor:
        """Clip gradients and update weights; return the norm of the gradients, 0-d.

        Adds statistics of layers to ``layers``, if given.
        """
        norms, tied = local_norms(self._parameters), self.runner.tied_duplicates
        grad_norm = clip_grad_norm_(
            self._parameters,
            self._run.config.training.max_norm,
            norms=norms,
            is_exact=self._run.config.debug.is_elastic,
            pp_mesh=self.model.dims.pp_mesh,
            tied_duplicates=tied,
        )
        self.nonfinite.update_found_inf(step, loss=loss, norms=norms, grad_norm=grad_norm)
        self._set_lr(lr)
        if layers is None:
            self.nonfinite.step()
        else:
            with self._layer_stats.observe_update(norms, tied) as found:
                self.nonfinite.step()
            layers |= found
        return grad_norm

    def _set_lr(self, lr: float | torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def metrics(self) -> dict[str, float]:
        """Return the expert load of the last step and the updates skipped so far. Collective."""
        # Also where this pipeline stage has no experts: their metrics are collective.
        load = self._expert_balancer.max_load_ratio() if self.model.has_moes else {}
        return {**load, "skipped_steps": self.nonfinite.skipped}
