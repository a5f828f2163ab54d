"""One rank writes each of equal shards, and the ranks write about as many bytes."""

import random
from collections import Counter

import numpy as np

from checkpoint.write_plan import DIGEST, assign_writes


def assigned(shards: list[dict[str, int]]) -> list[list[str]]:
    """Names that each rank writes; ``shards``: name to bytes, of each rank."""
    digests = [np.array([name.encode() for name in own], dtype=DIGEST) for own in shards]
    sizes = [np.array([*own.values()], dtype=np.int64) for own in shards]
    masks = assign_writes(digests, sizes)
    return [
        [name for name, is_mine in zip(own, mask, strict=True) if is_mine]
        for own, mask in zip(shards, masks, strict=True)
    ]


def test_each_shard_is_written_once() -> None:
    rng = random.Random(0)
    names = {f"shard {n}": rng.randrange(1, 1000) for n in range(200)}
    shards = [{name: size for name, size in names.items() if rng.random() < 0.5} for _ in range(7)]
    written = Counter(name for own in assigned(shards) for name in own)
    assert written == Counter(dict.fromkeys({name for own in shards for name in own}, 1))


def test_replicas_share_the_bytes() -> None:
    sizes = {f"shard {n}": (n + 1) ** 2 for n in range(40)}
    own = {"only of rank 0": 10_000}
    found = assigned([sizes | own, sizes, sizes, {}])
    bytes_of = [sum((sizes | own)[name] for name in names) for names in found]
    assert found[3] == []
    assert sum(bytes_of) == sum(sizes.values()) + 10_000
    assert max(bytes_of) < 1.05 * min(bytes_of[:3])
    assert assigned([{}, {}]) == [[], []]
