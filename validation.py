"""Validation loss on held-out documents, and generated samples."""

from dataclasses import dataclass

import torch

from data.loader import Microbatch, num_target_tokens
from data.step_batches import next_microbatches
from forward_backward import ModelRunner
from generation import sample_batch, window_length
from metrics.bits_per_byte import bits_per_nat
from parallelisms.parallel_dims import ParallelDims, sequence_multiple
from run_spec import RunSpec
from runtime.control import RunControl
from runtime.distributed import sum_in_order, sum_over
from runtime.log import logger


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


@dataclass(frozen=True)
class Sample:
    """Text that the model continued a prompt with, after a step."""

    step: int
    prompt: str
    text: str
    seed: int


class Sampler:
    """Samples a continuation of each prompt, the same way after every step."""

    def __init__(self, run: RunSpec, dims: ParallelDims) -> None:
        config = run.config.validation
        self._tokenizer, self._count = run.tokenizer, config.sample_tokens
        self._prompts = config.sample_prompts or [config.sample_prompt]
        self._encoded = [run.tokenizer.encode_prompt(prompt) for prompt in self._prompts]
        self._seeds = [run.config.debug.seed + index for index in range(len(self._prompts))]
        self._seq_len = run.config.training.seq_len
        method = run.config.parallelism.context_parallel_method
        self._multiple_of = sequence_multiple(dims.degrees, method)
        # Each rank gets all logits. This many rows have no more than a microbatch of training.
        length = window_length(
            self._encoded, self._count, seq_len=self._seq_len, multiple_of=self._multiple_of
        )
        n_tokens = run.microbatch_size * self._seq_len // (dims.degrees.cp * dims.degrees.tp)
        self._n_rows = max(1, n_tokens // length)

    def sample(self, runner: ModelRunner, step: int) -> list[Sample]:
        """Return a sample of each prompt whose logits are finite. Collective."""
        found = []
        for start in range(0, len(self._prompts), self._n_rows):
            group = slice(start, start + self._n_rows)
            texts = self._sample_group(runner, group)
            rows = zip(self._prompts[group], texts, self._seeds[group], strict=True)
            found += [
                Sample(step, prompt, text, seed) for prompt, text, seed in rows if text is not None
            ]
        if len(found) < len(self._prompts):
            logger.warning("sample: the model's logits are not finite")
        return found

    def _sample_group(self, runner: ModelRunner, group: slice) -> list[str | None]:
        sampled = sample_batch(
            lambda tokens: runner.logits(Microbatch(tokens, tokens)),
            self._encoded[group],
            count=self._count,
            n_ids=self._tokenizer.n_vocab,
            seq_len=self._seq_len,
            multiple_of=self._multiple_of,
            seeds=self._seeds[group],
        )
        return [None if tokens is None else self._tokenizer.decode(tokens) for tokens in sampled]
