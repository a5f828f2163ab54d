"""Statistics per layer: norms of weights, gradients and updates, activations, attention, experts.

Activations and attention logits are those of one more forward pass, without gradients and compiled
blocks: observing changes neither a compiled graph nor a bit of training, recomputation counts
nothing twice, and between the steps that are observed nothing is left behind.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from runtime.dtensor import sharding_groups, to_local
from runtime.log import logger
from runtime.norms import norms

# Attention logits, and positions, of a chunk of queries.
CHUNK, MAX_ROWS = 1 << 26, 256


class Layers(Protocol):
    """Layers of a model family; ``models.ModelSpec`` has them."""

    @property
    def blocks(self) -> Callable[[Any], nn.ModuleDict]: ...
    @property
    def attentions(self) -> Callable[[Any], list[nn.Module]]: ...
    @property
    def moes(self) -> Callable[[Any], list[nn.Module]]: ...


class LayerStats:
    """Statistics of every ``freq``-th step, by layer: the block's index, or a module besides."""

    def __init__(
        self,
        module: nn.Module,
        spec: Layers,
        *,
        fqns: Collection[str],
        data_mesh: DeviceMesh,
        freq: int,
        compiled: Collection[nn.Module] = (),
    ) -> None:
        """``module``: holds this rank's parameters. ``fqns``: of the whole model's parameters.

        ``freq``: 0 is never. ``compiled``: the modules that this rank calls, if their blocks are
        compiled. Mutates nothing.
        """
        self._freq, self._data_mesh, self._compiled = freq, data_mesh, compiled
        if not freq:
            return
        self._blocks = dict(spec.blocks(module).items())
        first = next(iter(self._blocks.values()))
        path = next(path for path, each in module.named_modules() if each is first)
        self._prefix = path.rpartition(".")[0] + "."
        self._rows = {name: i for i, name in enumerate(dict.fromkeys(map(self._layer_of, fqns)))}
        """Row of each layer of the whole model in what ranks reduce."""
        parameters = module.named_parameters()
        self._parameters = {p: self._rows[self._layer_of(fqn)] for fqn, p in parameters}
        self._attentions, self._moes = (
            self._by_row(modules) for modules in (spec.attentions(module), spec.moes(module))
        )
        logger.info("layer statistics: %d layers, every %d steps", len(self._rows), freq)

    def is_due(self, step: int) -> bool:
        return self._freq > 0 and step % self._freq == 0

    def observe_forward(self, evaluate: Callable[[], object]) -> dict[str, float]:
        """Return statistics of blocks and attentions during ``evaluate``. Collective.

        ``evaluate``: runs forward on the step's microbatches, without gradients. Call it before the
        step's backward, because new pipeline schedules drop gradients. Waits for the device.
        """
        device = torch.device(self._data_mesh.device_type)
        full = partial(torch.full, dtype=torch.float64, device=device)
        squares, largest = full((2, len(self._rows)), 0.0), full((len(self._rows),), -torch.inf)
        with ExitStack() as stack:
            for name, block in self._blocks.items():
                add = partial(_add_squares, squares[:, self._rows[name]])
                stack.callback(block.register_forward_hook(add).remove)
            for row, attention in self._attentions.items():
                # Context parallel wraps what attends to the whole sequence, or to its beginning.
                wrapper = getattr(attention.inner.forward, "__self__", None)
                inner = getattr(wrapper, "inner", attention.inner)
                update = partial(_update_largest, largest[row])
                stack.callback(inner.register_forward_pre_hook(update).remove)
                if self._compiled:  # Without FlexAttention's kernel, its logits would fill memory.
                    stack.enter_context(_stance(inner, "default", outside="force_eager"))
            for module in self._compiled:
                stack.enter_context(_stance(module, "force_eager", outside="default"))
            evaluate()
        # Tensor parallel ranks hold shards of the sequence between the blocks, and some heads.
        dims = ("batch", "cp", "tp", "pp")
        total, count = self._reduce(squares, dims)
        rms = torch.where(count > 0, (total / count).sqrt(), -torch.inf)
        logits = self._reduce(largest, dims, dist.ReduceOp.MAX)
        return self._by_key(activation_rms=rms, attention_logit=logits)

    @contextmanager
    def observe_update(
        self, norms: Collection[torch.Tensor], tied_duplicates: Collection[nn.Parameter] = ()
    ) -> Iterator[dict[str, float]]:
        """Observe the update that is made inside the context; fill its value at the end.

        Enter with the step's gradients, whose local ``norms`` are in the order of the parameters.
        ``tied_duplicates``: parameters that another pipeline stage counts. Waits for the device.
        Collective.
        """
        own = {p: row for p, row in self._parameters.items() if p not in set(tied_duplicates)}
        before = {p: to_local(p.detach()).clone() for p in own}
        stats: dict[str, float] = {}
        yield stats
        weights, grads, updates = self._sum_squares(
            own,
            {p: norm(old) for p, old in before.items()},
            dict(zip(self._parameters, norms, strict=True)),
            {p: norm(to_local(p.detach()), old) for p, old in before.items()},
        ).sqrt()
        stats |= self._by_key(
            weight_norm=weights,
            grad_norm=grads,
            # Zero-centered norms begin with weights of 0.
            update_ratio=torch.where(weights == 0, -torch.inf, updates / weights),
            dead_experts=self._dead_experts(),
        )

    def _by_key(self, **columns: torch.Tensor) -> dict[str, float]:
        """Return values (layers,) by their keys in metrics.jsonl. -inf: the layer has no such."""
        return {
            f"layer_{name}/{layer}": value
            for name, column in columns.items()
            for layer, value in zip(self._rows, column.tolist(), strict=True)
            if value != -torch.inf
        }

    def _layer_of(self, fqn: str) -> str:
        return fqn.removeprefix(self._prefix).partition(".")[0]

    def _by_row(self, modules: list[nn.Module]) -> dict[int, Any]:
        """Return the row of each module, which is part of a block."""
        inside = {each: name for name, block in self._blocks.items() for each in block.modules()}
        return {self._rows[inside[each]]: each for each in modules}

    def _sum_squares(
        self, own: Mapping[nn.Parameter, int], *norms: Mapping[nn.Parameter, torch.Tensor]
    ) -> torch.Tensor:
        """Sum squares of ``norms`` of shards over parameters and ranks: (norms, layers)."""
        device = to_local(next(iter(self._parameters)).detach()).device
        zeros = partial(torch.zeros, len(norms), len(self._rows), dtype=torch.float64)
        sums: dict[tuple, torch.Tensor] = defaultdict(lambda: zeros(device=device))
        for parameter, row in own.items():
            column = torch.stack([each[parameter] for each in norms]).double().square()
            sums[sharding_groups(parameter)][:, row] += column
        for groups, squares in sums.items():
            for group in groups:
                dist.all_reduce(squares, group=group)
        total = torch.stack([zeros(device=device), *sums.values()]).sum(dim=0)
        return self._reduce(total, ("pp",))

    def _dead_experts(self) -> torch.Tensor:
        """Return each layer's share of experts to which the step sent no token. Collective.

        -inf: no tokens were counted, because backward does not reach a frozen layer.
        """
        device = torch.device(self._data_mesh.device_type)
        shares = torch.full((len(self._rows),), -torch.inf, dtype=torch.float64, device=device)
        for row, moe in self._moes.items():
            counts = self._reduce(moe.tokens_per_expert.clone(), ("batch", "cp", "tp"))
            share = (counts == 0).double().mean()
            shares[row] = torch.where(counts.sum() > 0, share, -torch.inf)
        return self._reduce(shares, ("pp",), dist.ReduceOp.MAX)

    def _reduce(
        self,
        value: torch.Tensor,
        dims: Collection[str],
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> torch.Tensor:
        """All-reduce ``value`` in place over ``dims`` of the data mesh. Collective."""
        for dim in dims:
            group = self._data_mesh.get_group(dim)
            if group.size() > 1:
                dist.all_reduce(value, op=op, group=group)
        return value


def norm(new: torch.Tensor, old: torch.Tensor | None = None) -> torch.Tensor:
    """Return the 2-norm of a tensor, or of what changed since ``old``; 0-d, at least float32."""
    wide = torch.promote_types(new.dtype, torch.float32)
    changed = new if old is None else new.to(wide) - old.to(wide)
    [found] = norms([changed], wide)
    return found


def largest_attention_logit(
    q: torch.Tensor, k: torch.Tensor, document_ids: torch.Tensor | None
) -> torch.Tensor:
    """Return the largest q k / sqrt(d) that causal attention within documents sees; 0-d.

    q (b, s_q, h, d), k (b, s, h_kv, d), document_ids (b, s): as in ``InnerAttention``, the queries
    are the last s_q positions. In float32 or more, by chunks of queries.
    """
    (b, n_queries, h, d), (n_keys, h_kv) = q.shape, k.shape[1:3]
    wide, offset = torch.promote_types(q.dtype, torch.float32), n_keys - n_queries
    queries = q.unflatten(2, (h_kv, -1)).permute(0, 2, 3, 1, 4)  # (b, h_kv, h / h_kv, s_q, d)
    keys = k.permute(0, 2, 3, 1).to(wide)  # (b, h_kv, d, s)
    # Later keys than the chunk's last query are skipped.
    n_rows = min(MAX_ROWS, max(1, CHUNK // (b * h * n_keys)))
    found = []
    for start in range(offset, n_keys, n_rows):
        end = min(start + n_rows, n_keys)
        rows = queries[..., start - offset : end - offset, :].to(wide)
        logits = (rows.flatten(2, 3) @ keys[..., :end]).unflatten(2, rows.shape[2:4])
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        logits[..., start:].masked_fill_(future, -torch.inf)
        if document_ids is not None:
            is_other = document_ids[:, start:end, None] != document_ids[:, None, :end]
            logits.masked_fill_(is_other[:, None, None], -torch.inf)
        found.append(logits.amax())
    return torch.stack(found).amax() * d**-0.5


def _add_squares(sums: torch.Tensor, block: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """Hook that adds the squares of a block's output, and their number, to ``sums`` (2,)."""
    local = to_local(output)
    sums += torch.stack([norm(local).double().square(), sums.new_tensor(local.numel())])


def _update_largest(largest: torch.Tensor, inner: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Hook that raises ``largest``, 0-d, to the largest logit of an attention's inputs."""
    q, k, _, document_ids = inputs
    logit = largest_attention_logit(to_local(q), to_local(k), document_ids)
    torch.maximum(largest, logit.double(), out=largest)


@contextmanager
def _stance(module: nn.Module, stance: str, *, outside: str) -> Iterator[None]:
    """Set the compiler's stance while ``module`` runs: compiled graphs take no hooks."""

    def enter(module: nn.Module, inputs: Any) -> None:
        torch.compiler.set_stance(stance)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        torch.compiler.set_stance(outside)

    handles = (
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
