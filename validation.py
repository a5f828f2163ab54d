"""Validation loss on held-out documents, and a generated sample."""

import torch

from data.loader import Microbatch, num_target_tokens
from data.step_batches import next_microbatches
from forward_backward import ModelRunner
from generation import sample
from metrics.bits_per_byte import bits_per_nat
from parallelisms.parallel_dims import ParallelDims, sequence_multiple
from run_spec import RunSpec
from runtime.control import RunControl
from runtime.distributed import sum_in_order, sum_over


class Validator:
    """Evaluates held-out batches, which are read once: every validation uses the same."""

    def __init__(
        self,
        run: RunSpec,
        dims: ParallelDims,
        device: torch.device,
        control: RunControl,
    ) -> None:
        """Collective. Raises as ``next_microbatches`` does."""
        self._dims, steps = dims, run.config.validation.steps
        self._batches: dict[str, list[Microbatch]] = {}
        """By source label."""
        for label, mixture in run.held_out.items():
            loader = run.build_loader(mixture, dims, device)
            self._batches[label], *_ = next_microbatches(
                loader, steps * loader.n_microbatches, control
            )
        self._n_tokens = {
            label: int(sum_over(torch.tensor(num_target_tokens(batches)), dims.batch_mesh))
            for label, batches in self._batches.items()
        }
        self.bits_per_nat: float | None = None
        """Factor from nats per token to bits per byte; None if token lengths are unknown."""
        if run.tokenizer.byte_lengths is not None:
            labels = (batch.labels for batch in self._all())
            self.bits_per_nat = bits_per_nat(labels, run.tokenizer.byte_lengths, dims.batch_mesh)

    def evaluate(self, runner: ModelRunner) -> dict[str, float]:
        """Return the cross entropy in nats per token. Collective.

        Under "" that of all sources and, if there are several, each under its label.
        """
        losses = runner.evaluate(self._all())
        found = {"": self._sum(losses) / sum(self._n_tokens.values())}
        if len(self._batches) > 1:
            parts = losses.split([len(batches) for batches in self._batches.values()])
            for (label, n_tokens), part in zip(self._n_tokens.items(), parts, strict=True):
                found[label] = self._sum(part) / n_tokens
        return found

    def _all(self) -> list[Microbatch]:
        return [batch for batches in self._batches.values() for batch in batches]

    def _sum(self, losses: torch.Tensor) -> float:
        return sum_in_order(losses, self._dims.data_mesh).item()


def generate_sample(run: RunSpec, runner: ModelRunner, dims: ParallelDims) -> str:
    """Return the sample prompt and the model's continuation of it. Collective."""
    config, tokenizer = run.config, run.tokenizer
    prompt = tokenizer.encode_prompt(config.validation.sample_prompt)
    tokens = sample(
        lambda tokens: runner.logits(Microbatch(tokens, tokens)),
        prompt,
        count=config.validation.sample_tokens,
        n_ids=tokenizer.n_vocab,
        seq_len=config.training.seq_len,
        multiple_of=sequence_multiple(dims.degrees, config.parallelism.context_parallel_method),
        seed=config.debug.seed,
    )
    return config.validation.sample_prompt + tokenizer.decode(tokens)
