"""Degrees multiply to the number of ranks, or the error names them and says what would fit."""

import itertools
import math
import re

import pytest

from config.job_config import Parallelism
from parallelisms.parallel_dims import DEGREE_KEYS, resolve_degrees

REPLICATE, SHARD = "data_parallel_replicate_degree", "data_parallel_shard_degree"
TP, PP = "tensor_parallel_degree", "pipeline_parallel_degree"


def misfit(world_size: int, n_nodes: int = 1, **degrees: int) -> str:
    with pytest.raises(ValueError, match=r"^parallelism\.") as caught:
        resolve_degrees(Parallelism(**degrees), world_size, n_nodes=n_nodes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "nodes", "degrees", "message"),
    [
        (3, 1, {TP: 2}, f"parallelism.{TP} = 2 does not divide 3 ranks; NGPU=2 or 4 would"),
        (1, 1, {TP: 2}, f"parallelism.{TP} = 2 does not divide 1 rank; NGPU=2 would"),
        (8, 2, {PP: 3}, "does not divide 8 ranks; NGPU=3 or 6 on each of 2 nodes would"),
        (6, 1, {TP: 2, PP: 2}, f"parallelism.{PP} * parallelism.{TP} = 2 * 2 = 4 does not divide"),
        (2, 1, {SHARD: 1}, f"parallelism.{SHARD} = 1 is not the number of ranks, 2; NGPU=1 or"),
        (4, 1, {SHARD: 4, TP: 2}, f"NGPU=8 or {SHARD} = 2 (or -1) would"),
        (4, 4, {SHARD: 2}, f"ranks, 4; {SHARD} = 4 (or -1) would"),
        (9, 3, {SHARD: 2, TP: 2}, "= 2 * 2 = 4 is not the number of ranks, 9"),
        (2, 1, {TP: 10**12}, f"NGPU={10**12} would"),
    ],
)
def test_misfit_names_keys_and_what_would_fit(
    ranks: int, nodes: int, degrees: dict[str, int], message: str
) -> None:
    assert message in misfit(ranks, nodes, **degrees)


def test_every_misfit_suggests_only_what_fits() -> None:
    n_misfits = 0
    for values in itertools.product((1, 2, 3), (1, 2), (-1, 1, 4), (1, 2), (1, 3)):
        degrees = dict(zip(DEGREE_KEYS, values, strict=True))
        config = Parallelism(**degrees)
        for n_nodes, per_node in itertools.product((1, 2, 3), (1, 2, 3, 4, 8)):
            ranks = n_nodes * per_node
            fixed = math.prod(value for value in values if value > 0)
            if fixed == ranks or (-1 in values and ranks % fixed == 0):
                resolved = resolve_degrees(config, ranks, n_nodes=n_nodes)
                sizes = (resolved.pp, resolved.batch, resolved.cp, resolved.tp)
                assert math.prod(sizes) == ranks
                continue
            n_misfits += 1
            message = misfit(ranks, n_nodes, **degrees)
            for key, value in degrees.items():
                assert (f"parallelism.{key}" in message.partition(";")[0]) >= (value > 1)
            if found := re.search(r"NGPU=(\d+)(?: or (\d+))?", message):
                for fits in filter(None, found.groups()):
                    resolve_degrees(config, int(fits) * n_nodes)
            if found := re.search(rf"; .*{SHARD} = (\d+)", message):
                for shard in (int(found[1]), -1):
                    resolve_degrees(Parallelism(**degrees | {SHARD: shard}), ranks)
            # With -1 some number of ranks always fits.
            assert "; " in message or degrees[SHARD] != -1
    assert n_misfits > 100


@pytest.mark.parametrize("mode", ["fsdp2", "ddp"])
def test_remaining_ranks_are_data_parallel(mode: str) -> None:
    degrees = resolve_degrees(Parallelism(data_parallel=mode, tensor_parallel_degree=2), 6)
    shard, replicate = (3, 1) if mode == "fsdp2" else (1, 3)
    assert (degrees.dp_shard, degrees.dp_replicate, degrees.tp) == (shard, replicate, 2)
    with pytest.raises(ValueError, match=f"{REPLICATE} = 4 does not divide 6 ranks"):
        resolve_degrees(Parallelism(data_parallel=mode, data_parallel_replicate_degree=4), 6)
