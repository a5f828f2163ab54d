"""Validation loss on held-out documents, and generated samples."""

from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch

from config import ConfigError
from data.loader import Microbatch, MicrobatchLoader, num_target_tokens
from data.step_batches import DataError, next_microbatches
from forward_backward import ModelRunner
from generation import sample_batch, window_length
from metrics.bits_per_byte import bits_per_nat
from parallelisms.parallel_dims import ParallelDims, sequence_multiple
from run_spec import RunSpec
from runtime.control import RunControl
from runtime.distributed import sum_in_order, sum_over
from runtime.log import logger, show_phase


class Validator:
    """Evaluates batches of held-out documents, which are read once: every validation uses them."""

    def __init__(
        self,
        run: RunSpec,
        dims: ParallelDims,
        device: torch.device,
        control: RunControl,
    ) -> None:
        """Collective. Raises ``ConfigError`` for bad data or none, else ``RankFailure``."""
        show_phase("reading the validation batches")
        self._dims, self._control = dims, control
        self._n_microbatches = run.n_microbatches(dims.degrees.batch)
        # Losses of the user's own sources are looked up by name, also if there is only one.
        self._is_by_source = len(run.held_out) > 1 or bool(run.config.validation.sources)
        self._batches: dict[str, list[Microbatch]] = {}
        """By source label."""
        self._n_tokens: dict[str, int] = {}
        for label, mixture in run.held_out.items():
            with closing(run.build_loader(mixture, dims, device)) as loader:
                batches = _read_batches(loader, run.config.validation.steps, control)
            own = torch.tensor([num_target_tokens([batch]) for batch in batches], dtype=torch.int64)
            counts = sum_over(own, dims.batch_mesh).tolist()
            # Rows whose documents have ended would be evaluated for nothing.
            pairs = zip(batches, counts, strict=True)
            self._batches[label] = [batch for batch, n_tokens in pairs if n_tokens > 0]
            self._n_tokens[label] = sum(counts)
            if not any(counts):
                hint = "" if run.config.validation.sources else "; see data.validation_percent"
                raise ConfigError([f"validation: no document of {label} has text{hint}"])
        sizes = ", ".join(f"{label} {n:,}" for label, n in self._n_tokens.items())
        logger.info("validation: target tokens = %s", sizes)
        self.bits_per_nat: dict[str, float] = {}
        """Factors from nats per token to bits per byte; {} if token lengths are unknown. Keys as of
        ``evaluate``."""
        if (lengths := run.tokenizer.byte_lengths) is not None:
            for label, batches in self._groups().items():
                labels = (batch.labels for batch in batches)
                self.bits_per_nat[label] = bits_per_nat(labels, lengths, dims.batch_mesh)

    def evaluate(self, runner: ModelRunner) -> dict[str, float]:
        """Return the cross entropy in nats per token. Collective. Raises ``StopRequested``.

        Under "" that of all sources, which is the mean over their target tokens, and each under its
        label if they are several or the user's own.
        """
        batches, parts = self._all(), list[torch.Tensor]()
        for start in range(0, len(batches), self._n_microbatches):
            # The device always has one step to do, and a request to stop waits for two at most.
            if len(parts) > 1:
                parts[-2].sum().item()
            self._control.raise_if_stopped()
            parts.append(runner.evaluate(batches[start : start + self._n_microbatches]))
        losses = torch.cat(parts)
        found = {"": self._sum(losses) / sum(self._n_tokens.values())}
        if self._is_by_source:
            by_source = losses.split([len(batches) for batches in self._batches.values()])
            for (label, n_tokens), part in zip(self._n_tokens.items(), by_source, strict=True):
                found[label] = self._sum(part) / n_tokens
        return found

    def _groups(self) -> dict[str, list[Microbatch]]:
        return {"": self._all(), **(self._batches if self._is_by_source else {})}

    def _all(self) -> list[Microbatch]:
        return [batch for batches in self._batches.values() for batch in batches]

    def _sum(self, losses: torch.Tensor) -> float:
        return sum_in_order(losses, self._dims.data_mesh).item()


def _read_batches(
    loader: MicrobatchLoader, steps: int | Literal["all"], control: RunControl
) -> list[Microbatch]:
    """Read this rank's microbatches of ``steps`` global batches, or of all documents. Collective.

    A global batch after the last document has no target tokens on any rank.
    """
    batches: list[Microbatch] = []
    for _ in count() if steps == "all" else range(steps):
        try:
            found, _, sums = next_microbatches(loader, loader.n_microbatches, control)
        except DataError as error:
            raise error.cause from None
        if sums["tokens"] == 0:
            break
        batches += found
    return batches


@dataclass(frozen=True)
class Sample:
    """Text that the model continued a prompt with, after a step."""

    step: int
    prompt: str
    text: str
    seed: int


class Sampler:
    """Samples a continuation of each prompt, the same way after every step."""

    def __init__(self, run: RunSpec, dims: ParallelDims, control: RunControl) -> None:
        config, self._control = run.config.validation, control
        self._tokenizer, self._count = run.tokenizer, config.sample_tokens
        self._prompts = config.sample_prompts or [config.sample_prompt]
        self._encoded = [run.tokenizer.encode_prompt(prompt) for prompt in self._prompts]
        self._seeds = [run.config.debug.seed + index for index in range(len(self._prompts))]
        seq_len = run.config.training.seq_len
        method = run.config.parallelism.context_parallel_method
        # One length for all, because each shape is a compilation.
        self._length = window_length(
            self._encoded,
            self._count,
            seq_len=seq_len,
            multiple_of=sequence_multiple(dims.degrees, method),
        )
        # Each rank gets all logits. This many rows have no more than a microbatch of training.
        n_tokens = run.microbatch_size * seq_len // (dims.degrees.cp * dims.degrees.tp)
        self._n_rows = max(1, n_tokens // self._length)

    def sample(self, runner: ModelRunner, step: int) -> list[Sample]:
        """Return a sample of each prompt whose logits are finite. Collective. Raises
        ``StopRequested``."""
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
        def logits_of(tokens: torch.Tensor) -> torch.Tensor:
            self._control.raise_if_stopped()
            return runner.logits(Microbatch(tokens, tokens))

        sampled = sample_batch(
            logits_of,
            self._encoded[group],
            count=self._count,
            n_ids=self._tokenizer.n_vocab,
            length=self._length,
            seeds=self._seeds[group],
        )
        return [None if tokens is None else self._tokenizer.decode(tokens) for tokens in sampled]
