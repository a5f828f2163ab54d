"""Small run: a model, its optimizer and JSON values with a checkpointer."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoint.checkpointer import Checkpointer
from checkpoint.states import ModelState, OptimizerState
from config.job_config import Checkpoint, Optimizer
from models import TransformerArgs
from optim.muon import hidden_matrices
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from tests.lib.layouts import CPU, Layout, digest, on_shards, shard_debugmodel, small_args

ARGS = replace(small_args("qwen3", "debugmodel"), n_layers=1, dim=32, hidden_dim=48, head_dim=8)


@dataclass
class Values:
    """``Stateful`` of JSON values."""

    state: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class Run:
    def __init__(
        self,
        folder: Path,
        layout: Layout,
        *,
        args: TransformerArgs = ARGS,
        optimizer: Optimizer | None = None,
        dtype: str = "float32",
        **config: Any,
    ) -> None:
        sharded = shard_debugmodel("qwen3", args, layout, dtype=dtype)
        self.model, dims = sharded.module, sharded.dims
        materialize(self.model, CPU, seed=1)
        self.optimizer = build_optimizer(
            self.model,
            optimizer or Optimizer(),
            matrices=hidden_matrices(self.model.layers, moes=[]),
            weight_mesh=dims.weight_mesh,
        )
        self.values = Values()
        self.model_state = ModelState(self.model)
        self._optimizer_state = OptimizerState(self.model, self.optimizer)
        self.checkpointer = self.checkpointer_in(folder, **config)

    def checkpointer_in(self, folder: Path, **config: Any) -> Checkpointer:
        return Checkpointer(
            folder,
            Checkpoint(**config),
            tensor_states={"model": self.model_state, "optimizer": self._optimizer_state},
            json_states={"train": self.values},
            metadata={},
            validate=lambda manifest: None,
        )

    def spoil(self) -> None:
        """Overwrite the whole state, so that only a load can give the saved one."""
        self.values.state = {"step": -1}
        for parameter in self.model.parameters():
            for tensor in (parameter.detach(), *self.optimizer.state.get(parameter, {}).values()):
                tensor.fill_(7)

    def save(self, *steps: int, unused: str | None = None) -> None:
        """Run one optimizer update before each save. ``unused``: an FQN without a gradient."""
        for step in steps:
            for fqn, parameter in self.model.named_parameters():
                if fqn == unused:
                    continue
                parameter.grad = on_shards(lambda x, step=step: x - 0.1 * step, parameter)
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-3 / step
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.values.state = {"step": step}
            self.checkpointer.begin(step)
            self.checkpointer.finish()

    def digests(self) -> dict[str, str]:
        """Digest every weight and optimizer tensor in memory, not as saved."""
        found = {}
        for fqn, parameter in self.model.named_parameters():
            found[fqn] = digest(parameter)
            for name, value in self.optimizer.state[parameter].items():
                found[f"{fqn}.{name}"] = digest(value)
        return found
