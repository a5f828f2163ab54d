"""The pool of ranks that tests share: what a call may rely on."""

from datetime import timedelta

import torch
import torch.distributed as dist

from tests.lib.ranks import RankPool


def settings() -> tuple[str, bool, torch.dtype, int]:
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )


def change_settings() -> tuple[str, bool, torch.dtype, int]:
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    return settings()


def test_call_leaves_no_setting_to_the_next(ranks: RankPool) -> None:
    before = ranks.run(settings, 2)
    assert ranks.run(change_settings, 2) == [("medium", True, torch.float64, 2)] * 2
    assert ranks.run(settings, 2) == before


def wait_for_rank_0() -> str:
    """Rank 1 waits for what rank 0, which returns at once, never sends: return the error."""
    if dist.get_rank() == 0:
        return ""
    try:
        dist.irecv(torch.zeros(1), src=0).wait(timedelta(seconds=0.3))  # type: ignore[union-attr]
    except RuntimeError as error:
        return str(error)
    return "received"


def test_no_rank_leaves_the_group_before_others_are_done(ranks: RankPool) -> None:
    assert "Timed out" in ranks.run(wait_for_rank_0, 2)[1]
