"""The model's loss on text that it was not trained on, and a sample of what it writes."""

from collections.abc import Callable

import torch

from data.feed import take_together
from data.loader import Batch, BatchLoader, count_valid
from data.mixture import Mixture
from forward_backward import Runner
from job import Job
from metrics.bits_per_byte import bits_per_nat
from metrics.sample import printable, sample
from parallelisms.parallel_dims import ParallelDims, sequence_multiple
from runtime.control import RunControl
from runtime.distributed import sum_in_order, sum_over


class HeldOut:
    """Held-out text, read once: every validation is on the same batches."""

    def __init__(
        self,
        job: Job,
        build_loader: Callable[[Mixture], BatchLoader],
        dims: ParallelDims,
        control: RunControl,
    ) -> None:
        """A collective."""
        self._dims, steps = dims, job.config.validation.steps
        self._batches: dict[str, list[Batch]] = {}
        """By the label of their source."""
        for label, mixture in job.held_out.items():
            loader = build_loader(mixture)
            self._batches[label], *_ = take_together(loader, steps * loader.microbatches, control)
        self._n_tokens = {
            label: int(sum_over(torch.tensor(count_valid(batches)), dims.batch_mesh))
            for label, batches in self._batches.items()
        }
        self.bits_per_nat: float | None = None
        """Factor from nats per token to bits per byte; None if tokens' lengths are not known."""
        if job.tokenizer.byte_lengths is not None:
            labels = (batch.labels for batch in self._all())
            self.bits_per_nat = bits_per_nat(labels, job.tokenizer.byte_lengths, dims.batch_mesh)

    def losses(self, runner: Runner) -> dict[str, float]:
        """Cross entropy in nats per token: of all sources under "" and, if there are several, of
        each under its label. A collective."""
        losses = runner.evaluate(self._all())
        found = {"": self._sum(losses) / sum(self._n_tokens.values())}
        if len(self._batches) > 1:
            parts = losses.split([len(batches) for batches in self._batches.values()])
            for (label, n_tokens), part in zip(self._n_tokens.items(), parts, strict=True):
                found[label] = self._sum(part) / n_tokens
        return found

    def _all(self) -> list[Batch]:
        return [batch for batches in self._batches.values() for batch in batches]

    def _sum(self, losses: torch.Tensor) -> float:
        return sum_in_order(losses, self._dims.data_mesh).item()


def written_text(job: Job, runner: Runner, dims: ParallelDims) -> str:
    """The prompt and the model's continuation of it. A collective."""
    config, tokenizer = job.config, job.tokenizer
    prompt = [tokenizer.bos_id, *tokenizer.encode(config.validation.sample_prompt).tolist()]
    tokens = sample(
        lambda tokens: runner.logits(Batch(tokens, tokens)),
        prompt,
        count=config.validation.sample_tokens,
        n_ids=tokenizer.n_vocab,
        seq_len=config.training.seq_len,
        multiple_of=sequence_multiple(dims.degrees, config.parallelism.context_parallel_method),
        seed=config.debug.seed,
    )
    return printable(config.validation.sample_prompt + tokenizer.decode(tokens))
