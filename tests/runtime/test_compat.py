from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import RankPool


def gloo_workers() -> int:
    """Worker threads of this process's gloo groups, after a collective in each of two."""
    for group in (dist.group.WORLD, dist.new_group()):
        dist.all_reduce(torch.ones(1), group=group)
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


def test_a_gloo_group_has_one_worker(ranks: RankPool) -> None:
    assert ranks.run(gloo_workers, 2) == [2, 2]
