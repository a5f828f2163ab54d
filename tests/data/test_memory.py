"""A loader's memory does not grow with the corpus."""

import json
from pathlib import Path

import numpy as np
import pytest

from config.job_config import Data
from data.loader import LoaderConfig, MicrobatchLoader
from data.mixture import Mixture
from data.sources import build_sources
from data.tokenizer import load_tokenizer
from tests.lib.ranks import RankPool

SEQ_LEN, ROWS = 2048, 16
TOKENS_PER_SHARD, TOKENS_PER_DOCUMENT = 1 << 26, 1 << 10


def write_megatron(path: Path, n_tokens: int) -> None:
    """Write ``n_tokens`` byte ids in Megatron-LM's format."""
    generator = np.random.default_rng(0)
    n_documents = n_tokens // TOKENS_PER_DOCUMENT
    with path.with_suffix(".bin").open("wb") as file:
        for _ in range(n_tokens // (1 << 22)):
            file.write(generator.integers(0, 256, 1 << 22, dtype=np.uint16).tobytes())
    with path.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\0\0" + np.uint64(1).tobytes() + np.uint8(8).tobytes())
        file.write(np.array([n_documents, n_documents + 1], np.uint64).tobytes())
        file.write(np.full(n_documents, TOKENS_PER_DOCUMENT, np.int32).tobytes())
        pointers = np.arange(n_documents, dtype=np.int64) * TOKENS_PER_DOCUMENT * 2
        file.write(pointers.tobytes() + np.arange(n_documents + 1, dtype=np.int64).tobytes())


def private_mib() -> float:
    """Private memory of this process in MiB, without file mappings."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    fields = {line.split()[0]: line.split()[1] for line in lines[1:]}
    return (int(fields["Private_Dirty:"]) + int(fields["Anonymous:"])) / 2 / 1024


def memory_to_read(folder: Path, n_files: int) -> float:
    """Memory in MiB that a loader allocates for 400 batches from ``n_files`` files."""
    config = Data(source="tokens", path=str(folder / f"{n_files}" / "*.idx"))
    before = private_mib()
    sources, _ = build_sources(config, 0)
    loader = MicrobatchLoader(Mixture(sources), load_tokenizer("bytes"), LoaderConfig(
vocab_size=320,
seq_len=SEQ_LEN,
microbatch_size=ROWS,
global_batch_size=ROWS,
dp_rank=0,
dp_degree=1,
document_mask=True,
prefetch=4,
))  # fmt: skip
    for _ in range(400):
        next(loader)
    return private_mib() - before


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Compare 128 MB with 2 GB of ids, which are hard links to one file."""
    write_megatron(tmp_path / "one", TOKENS_PER_SHARD)
    for n_files in (1, 16):
        (tmp_path / f"{n_files}").mkdir()
        for number in range(n_files):
            for suffix in ("bin", "idx"):
                path = tmp_path / f"{n_files}" / f"{number}.{suffix}"
                path.hardlink_to(tmp_path / f"one.{suffix}")
    measured = []
    for n_files in (1, 16):
        pool = RankPool()
        measured += pool.run(memory_to_read, 1, tmp_path, n_files)
        pool.close()
    small, large = measured
    print(json.dumps({"128 MB": small, "2 GB": large}))
    # Per document: its hash, its index in the order, and temporarily its sort key.
    n_documents = 15 * TOKENS_PER_SHARD / TOKENS_PER_DOCUMENT
    assert large < 200
    assert large - small < 40 * n_documents / 2**20 + 16
