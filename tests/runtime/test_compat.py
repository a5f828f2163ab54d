from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import RankPool


def gloo_workers() -> int:
    """Worker threads of all gloo groups of this process, those of earlier tests too."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


def workers_of_a_new_group() -> int:
    dist.all_reduce(torch.ones(1))  # A thread has its name once it has begun.
    before = gloo_workers()
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    return gloo_workers() - before


def test_a_gloo_group_has_one_worker(ranks: RankPool) -> None:
    assert ranks.run(workers_of_a_new_group, 2) == [1, 1]
