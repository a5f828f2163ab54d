"""Loaders of a small global batch, a tokenizer for them, and loaders with faults."""

from typing import Any

import numpy as np

from data.loader import LoaderConfig, Microbatch, MicrobatchLoader
from data.mixture import Mixture
from data.sources import Source
from data.tokenizer import Tokenizer

SEQ_LEN, ROWS = 16, 8

# A token belongs to one document only, so counts of tokens show what was read how often.
UNIQUE = Tokenizer(
    encode=lambda text: np.array([int(word) for word in text.split()], np.int64),
    decode=lambda ids: " ".join(map(str, ids)),
    n_vocab=1 << 20,
    bos_id=0,
    eos_id=1,
    fingerprint="unique",
)


def documents(count: int, longest: int, seed: int = 0) -> list[str]:
    """Texts of 0 to ``longest`` unique tokens."""
    lengths = np.random.default_rng(seed).integers(0, longest, count, endpoint=True)
    ends = np.cumsum(lengths) + 2
    return [" ".join(map(str, range(e - n, e))) for e, n in zip(ends, lengths, strict=True)]


def build(
    source: Source | Mixture,
    dp_degree: int = 1,
    dp_rank: int = 0,
    tokenizer: Tokenizer = UNIQUE,
    **changes: Any,
) -> MicrobatchLoader:
    keywords: dict[str, Any] = {
        "vocab_size": UNIQUE.n_vocab,
        "seq_len": SEQ_LEN,
        "microbatch_size": 1,
        "global_batch_size": ROWS,
        "document_mask": False,
        "prefetch": 2,
    }
    config = LoaderConfig(dp_rank=dp_rank, dp_degree=dp_degree, **(keywords | changes))
    mixture = source if isinstance(source, Mixture) else Mixture([source])
    return MicrobatchLoader(mixture, tokenizer, config)


class CountsPrefetched(MicrobatchLoader):
    """Fault: the state includes prefetched batches."""

    def commit(self, microbatches: list[Microbatch]) -> None:
        super().commit([*microbatches, *(prepared.result() for prepared in self._prefetched)])


class CountsTaken(MicrobatchLoader):
    """Fault: the state includes batches that are not committed."""

    def __next__(self) -> Microbatch:
        batch = super().__next__()
        self.commit([batch])
        return batch
