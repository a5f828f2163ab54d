"""What a loader holds does not grow with what there is to read."""

import json
from pathlib import Path

import numpy as np
import pytest

from config.job_config import Data
from data.loader import BatchLoader
from data.mixture import Mixture
from data.sources import build_sources
from data.tokenizer import load_tokenizer
from tests.ranks import RankPool

SEQ_LEN, ROWS = 2048, 16
TOKENS_PER_SHARD, TOKENS_PER_DOCUMENT = 1 << 26, 1 << 10


def write_megatron(path: Path, n_tokens: int) -> None:
    """As Megatron-LM does: ids of a byte each, and where documents begin."""
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


def own_mib() -> float:
    """Memory of this process that is no other's, and no file's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    facts = {line.split()[0]: line.split()[1] for line in lines[1:]}
    return (int(facts["Private_Dirty:"]) + int(facts["Anonymous:"])) / 2 / 1024


def read(folder: Path, n_files: int) -> float:
    """MiB that it takes to read a while from so many files."""
    # One file, by as many names as it takes.
    config = Data(source="tokens", path=str(folder / f"{n_files}" / "*.idx"))
    before = own_mib()
    sources, _ = build_sources(config, 0)
    loader = BatchLoader(
        Mixture(sources), load_tokenizer("bytes"), vocab_size=320, seq_len=SEQ_LEN,
        local_batch_size=ROWS, global_batch_size=ROWS, rank=0, degree=1, document_mask=True,
        prefetch=4,
    )  # fmt: skip
    for _ in range(400):
        next(loader)
    return own_mib() - before


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """128 MB against 2 GB of ids."""
    write_megatron(tmp_path / "one", TOKENS_PER_SHARD)
    for n_files in (1, 16):
        (tmp_path / f"{n_files}").mkdir()
        for number in range(n_files):
            for suffix in ("bin", "idx"):
                place = tmp_path / f"{n_files}" / f"{number}.{suffix}"
                place.hardlink_to(tmp_path / f"one.{suffix}")
    found = []
    for n_files in (1, 16):
        fresh = RankPool()
        found += fresh.run(read, 1, tmp_path, n_files)
        fresh.close()
    small, large = found
    print(json.dumps({"128 MB": small, "2 GB": large}))
    # Of each document: its key, its place in the order, and the order's draws for a moment.
    n_documents = 15 * TOKENS_PER_SHARD / TOKENS_PER_DOCUMENT
    assert large < 200
    assert large - small < 40 * n_documents / 2**20 + 16
