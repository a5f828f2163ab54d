"""Cost of fault tolerance per step, save and restart. Needs an idle machine."""

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash

from checkpoint.hashed_file import HashedFile, describe_file
from config.job_config import Numerics, Optimizer, Parallelism
from data.loader import Microbatch
from data.mixture import RowState
from data.packing import RowSpan
from forward_backward import SPMDRunner
from metrics.ledger import AttemptHeader, Ledger
from models import find_model
from optim.grad_norm import clip_grad_norm_, local_norms
from optim.nonfinite import NonfiniteGuard
from optim.optimizer import build_optimizer
from parallelisms.materialize import materialize
from runtime.control import RunControl
from runtime.signals import handle_signals
from tests.lib.launch import records, start, wait_for_steps
from tests.lib.layouts import CPU, Layout, shard_debugmodel, small_args
from tests.lib.ranks import RankPool
from tests.lib.small_run import Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.row(28, "All this costs next to nothing on the way of a step"),
]
BATCH, SEQ_LEN, STEPS = 8, 256, 12


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def test_hashing_is_faster_than_disks(tmp_path: Path, record_result: Callable[[str], None]) -> None:
    data = os.urandom(1 << 28)
    file = HashedFile(tmp_path / "data")
    file.write(data)
    file.close()
    hashed = seconds(lambda: xxhash.xxh3_128(data).digest())
    verified = seconds(lambda: describe_file(tmp_path / "data"))
    per_gigabyte = [hashed * 4, verified * 4]
    assert sum(per_gigabyte) < 1.0
    texts = [f"{value:.2f}" for value in per_gigabyte]
    record_result(f"s per GiB: {texts[0]} to hash while writing, {texts[1]} to read and verify")


def batches() -> Iterable[Microbatch]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        ids = torch.randint(0, 64, (BATCH, SEQ_LEN + 1), generator=generator)
        start, end = RowState((0,), (0,), 0, 0, 0), RowState((0,), (0,), 0, 0, SEQ_LEN)
        spans = tuple(RowSpan(row, start, end) for row in range(BATCH))
        yield Microbatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, None, spans)


def time_steps(folder: Path) -> dict[str, float]:
    """Median seconds of a step and of its parts on the debug model."""
    layout = Layout(2)
    _, published = find_model("llama3", "debugmodel")
    args = replace(published, vocab_size=320, max_seq_len=SEQ_LEN)
    sharded = shard_debugmodel("llama3", args, layout)
    model, dims = sharded.module, sharded.dims
    materialize(model, CPU, seed=1)
    optimizer = build_optimizer(model, Optimizer())
    named = dict(model.named_parameters())
    guard = NonfiniteGuard(
        optimizer, named, fqns=list(named), weight_mesh=dims.weight_mesh, config=Numerics()
    )
    runner = SPMDRunner(model, parallelism=Parallelism(), device=CPU)
    rank = dist.get_rank()
    control = RunControl(folder / "control")
    control.acquire_lock()
    attempt = AttemptHeader(
        attempt="a", parent=None, resumed_from=0, data_after=0, world_size=2, rank=rank,
        dp_rank=rank, n_rows=2 * BATCH,
    )  # fmt: skip
    ledger = Ledger(folder / "ledger", attempt)
    names = ("step", "count of tokens", "consensus", "finite check", "ledger")
    times: dict[str, list[float]] = {name: [] for name in names}
    count = torch.ones(1, dtype=torch.int64)
    parameters = list(named.values())
    for step, batch in zip(range(STEPS), batches(), strict=False):
        begin = time.perf_counter()
        dist.barrier()
        # Every step all-reduces its token count anyway; the consensus is charged for the rest.
        times["count of tokens"].append(seconds(lambda: dist.all_reduce(count)))
        times["consensus"].append(
            seconds(lambda: control.all_reduce_counts(tokens=1, mistakes=0, writers=0))
        )
        losses = runner.forward_backward([batch], BATCH * SEQ_LEN)
        norms = local_norms(parameters)
        norm = clip_grad_norm_(parameters, 1.0, norms=norms)
        loss = losses.sum()
        times["finite check"].append(
            seconds(lambda: guard.update_found_inf(step, loss=loss, norms=norms, grad_norm=norm))  # noqa: B023
        )
        optimizer.step()
        optimizer.zero_grad()
        values = {"loss": loss.item(), "grad_norm": norm.item()}
        times["ledger"].append(seconds(lambda: ledger.log(step, [batch], **values)))  # noqa: B023
        times["step"].append(time.perf_counter() - begin)
    handle_signals(signal.SIG_DFL)
    return {name: statistics.median(values) for name, values in times.items()}


def test_overhead_per_step(
    ranks: RankPool, tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    times = ranks.run(time_steps, 2, tmp_path)[0]
    step = times.pop("step")
    times["consensus"] = max(0.0, times["consensus"] - times.pop("count of tokens"))
    share = sum(times.values()) / step
    texts = [f"{name} {1000 * value:.2f}" for name, value in times.items()]
    record_result(
        f"ms of a step of {1000 * step:.0f}: {', '.join(texts)}; together {100 * share:.2f} %"
    )
    # The costs do not grow with the model: at most 0.5 % of a step of one second.
    assert sum(times.values()) < 0.005


def time_saves(folder: Path) -> tuple[float, float]:
    """Seconds for which an asynchronous and a synchronous save block."""
    args = replace(small_args("llama3", "debugmodel"), dim=512, hidden_dim=1536, n_layers=2)
    blocked = []
    for mode in ("async", "disabled"):
        run = Run(folder / mode, Layout(2), args=args, async_mode=mode)
        times = []
        for step in range(1, 4):
            times.append(seconds(lambda: run.checkpointer.begin(step)))  # noqa: B023
            run.checkpointer.finish()
        run.checkpointer.close()
        # The first save also plans and allocates.
        blocked.append(min(times))
    return blocked[0], blocked[1]


def test_async_save_blocks_only_for_a_copy(
    ranks: RankPool, tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    asynchronous, synchronous = ranks.run(time_saves, 2, tmp_path)[0]
    [checkpoint] = (tmp_path / "async").glob("step-00000003")
    size = sum(path.stat().st_size for path in checkpoint.iterdir()) / 2**20
    blocked = f"{1000 * asynchronous:.0f} asynchronous, {1000 * synchronous:.0f} synchronous"
    record_result(f"ms for which a save of {size:.0f} MiB blocks: {blocked}")
    assert asynchronous < synchronous


def test_killed_run_restarts_quickly(tmp_path: Path, record_result: Callable[[str], None]) -> None:
    keys = {"training.steps": "100000", "lr_scheduler.total_steps": "100000"}
    first = start(tmp_path, 2, **keys, **{"checkpoint.interval": "3"})
    wait_for_steps(tmp_path, first)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    begin, n_records = time.perf_counter(), len(records(tmp_path))
    second = start(tmp_path, 2, **keys, **{"checkpoint.interval": "3"})
    while len(records(tmp_path)) <= n_records or second.poll() is not None:
        assert second.poll() is None, second.communicate()
        time.sleep(0.01)
    record_result(
        f"{time.perf_counter() - begin:.1f} s from a kill to the first new step, files warm"
    )
    second.terminate()
    assert second.wait() == 75
