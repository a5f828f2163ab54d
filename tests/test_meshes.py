"""Runs on any mesh train the same model, in float64.

Validation, samples and consumed tokens are equal too, also if the mesh changes on resume. Guards
and monitors of the run cover all stages of a pipeline.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

import forward_backward
import run_log
import train_step
import validation
from checkpoint.tensor_files import Reader
from config.job_config import ActivationCheckpoint
from metrics import stragglers
from parallelisms import context_parallel
from runtime import exit_codes
from runtime.dtensor import to_local
from tests.lib.forked import (
    checkpoints,
    codes,
    differences,
    log,
    nothing,
    run,
    spike_at_step_5,
    started,
    tensors,
)
from tests.lib.launch import curve, records
from tests.lib.layouts import CP, METHOD, MODE, PP, REPLICATE, SCHEDULE, TP, Layout
from tests.lib.marks import slow
from tools import check_ledger

UNTIED, TIED = FLAVORS = ("debugmodel", "debugmodel_tied")
PROMPT = "def loss(logits, labels, mask):"
# As many layers as any pipeline here has stages; two microbatches on two ranks, and as many
# microbatches.
KEYS = {
    "model.args.n_layers": "4",
    "lr_scheduler.total_steps": "40",
    "training.local_batch_size": "1",
    "training.global_batch_size": "4",
}
OBSERVED = {
    "validation.enable": "true",
    "validation.freq": "4",
    "validation.steps": "2",
    # Prompt and sample are longer than a sequence, so the window slides.
    "validation.sample_tokens": "4",
    "validation.sample_prompt": "",
    "validation.sample_prompts": f'["{PROMPT}", "def "]',
    "metrics.enable_ledger": "true",
}
STEPS = 4
MICROBATCH_SIZE = "pipeline_parallel_microbatch_size"
INTERLEAVED = {PP: 2, SCHEDULE: "Interleaved1F1B"}
GATHERED = {CP: 2, METHOD: "allgather"}
SELECTIVE = ActivationCheckpoint(mode="selective")
DOCUMENTS = {"data.document_mask": "true"}
Plant = Callable[[], None]
Reference = Callable[..., Path]


def keys_of(layout: Layout, flavor: str = UNTIED, steps: int = STEPS) -> dict[str, str]:
    """Overrides of the debug config."""
    parallelism = {f"parallelism.{key}": str(value) for key, value in layout.parallelism.items()}
    others = {"training.steps": str(steps), "activation_checkpoint.mode": layout.recompute.mode}
    if size := layout.parallelism.get(MICROBATCH_SIZE):
        others["training.local_batch_size"] = str(size)
    return KEYS | parallelism | others | {"model.flavor": flavor}


def run_with(
    plant: Plant, folder: Path, layout: Layout, keys: dict[str, str], want: int = exit_codes.DONE
) -> None:
    with started(folder, layout.world_size, plant=plant, **keys) as processes:
        assert codes(processes) == {want}, log(folder)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Train uninterrupted with FSDP and these keys; return the folder, cached by keys."""

    @cache
    def folder_of(flavor: str, steps: int = STEPS, plant: Plant = nothing, **keys: str) -> Path:
        folder = tmp_path_factory.mktemp("two_ranks")
        run_with(plant, folder, Layout(2), keys_of(Layout(2), flavor, steps) | keys)
        return folder

    return folder_of


def assert_same_run(folder: Path, want: Path) -> None:
    """Compare curves, the sample of each rank and every row of every step."""
    assert_same_curve(folder, want)
    got = validation_curve(folder)
    for step, loss in validation_curve(want).items():
        assert got[step] == pytest.approx(loss, rel=1e-9), f"validation after step {step}"
    assert set(samples(folder)) == set(samples(want)), "text"
    assert written_samples(folder).items() <= written_samples(want).items(), "samples.jsonl"
    runs = [str(path / "debug_model") for path in (folder, want)]
    assert check_ledger.main([runs[0], "--against", runs[1]]) == 0, "ledger"


def assert_same_curve(folder: Path, want: Path) -> None:
    got = curve(folder)
    assert list(got) == list(curve(want))
    for step, values in curve(want).items():
        assert got[step] == pytest.approx(values, rel=1e-9), f"step {step}"


def validation_curve(folder: Path) -> dict[int, float]:
    found = records(folder)
    return {r["step"]: r["validation_loss"] for r in found if "validation_loss" in r}


def samples(folder: Path) -> list[str]:
    """Final text sample in the log of each rank."""
    # The next log line begins with the time.
    text = re.compile(r"sample:\n(.*?)^[\d-]+ \d\d:\d\d:\d\d ", re.DOTALL | re.MULTILINE)
    logs = [path.read_text() for path in sorted(folder.glob("rank-*.log"))]
    return [found[1] if (found := text.search(log)) else "" for log in logs]


def written_samples(folder: Path) -> dict[tuple[int, str], str]:
    """Texts of ``samples.jsonl`` by step and prompt."""
    lines = (folder / "debug_model" / "samples.jsonl").read_text().splitlines()
    return {(line["step"], line["prompt"]): line["text"] for line in map(json.loads, lines)}


def test_reference_run_has_everything_compared(two_ranks: Reference) -> None:
    folder = two_ranks(UNTIED, **OBSERVED)
    assert list(curve(folder)) == list(range(1, STEPS + 1))
    assert list(validation_curve(folder)) == [0, STEPS]
    assert list(written_samples(folder)) == list(product((0, STEPS), (PROMPT, "def ")))
    first, second = samples(folder)
    assert first == second
    # Those of the last step are shown once, whole: not on a line of their step too.
    lines = re.findall(r"step +(\d+)  sample: ", (folder / "rank-0.log").read_text())
    assert lines == ["0", "0"]
    # The lines of a sample are indented.
    assert first.startswith(f"  {PROMPT}")
    assert len(first) > len(PROMPT) + 3


LAYOUTS = [
    Layout(1),
    Layout(2, {MODE: "ddp"}),
    Layout(2, {MODE: "simple_fsdp"}),
    Layout(4, {REPLICATE: 2}),
    Layout(4, {TP: 2}),
    # Fewer KV heads than ranks.
    Layout(4, {TP: 4}),
    Layout(2, {CP: 2}),
    Layout(2, GATHERED),
    Layout(4, {CP: 4}),
    Layout(4, {CP: 4, METHOD: "allgather"}),
    Layout(4, {CP: 2, TP: 2}),
    Layout(4, GATHERED | {TP: 2}),
    Layout(2, GATHERED, recompute=SELECTIVE),
    Layout(2, {PP: 2}),
    Layout(2, {PP: 2}, recompute=SELECTIVE),
    Layout(2, {PP: 2, MICROBATCH_SIZE: 2}),
    Layout(2, {PP: 2, SCHEDULE: "GPipe"}),
    Layout(2, {PP: 2, SCHEDULE: "InterleavedZeroBubble"}),
    Layout(2, INTERLEAVED),
    # Stages of 1, 2 and 1 layers.
    Layout(3, {PP: 3}),
    Layout(4, {PP: 4}),
    Layout(4, {PP: 2, MODE: "ddp"}),
    Layout(4, {PP: 2, MODE: "simple_fsdp"}),
    Layout(4, {PP: 2, REPLICATE: 2}),
    Layout(4, {PP: 2, TP: 2}),
    Layout(4, {PP: 2, CP: 2}),
    Layout(4, INTERLEAVED | {TP: 2}),
    Layout(4, INTERLEAVED | GATHERED),
    Layout(8, {PP: 2, CP: 2, TP: 2}),
    Layout(8, INTERLEAVED | GATHERED | {TP: 2}),
]
# Runs below change to and from most of the others.
QUICK = [
    (UNTIED, Layout(1)),
    (UNTIED, Layout(2, {MODE: "ddp"})),
    (UNTIED, Layout(4, {REPLICATE: 2})),
    (UNTIED, Layout(4, {TP: 2})),
    (TIED, Layout(2, {PP: 2}, recompute=SELECTIVE)),
    (TIED, Layout(2, INTERLEAVED)),
    (UNTIED, Layout(4, {PP: 2, CP: 2})),
]


@pytest.mark.parametrize(
    ("flavor", "layout"),
    [case if case in QUICK else slow(*case) for case in product(FLAVORS, LAYOUTS)],
    ids=str,
)
def test_any_mesh_trains_the_same_model(
    two_ranks: Reference, tmp_path: Path, flavor: str, layout: Layout
) -> None:
    run(tmp_path, layout.world_size, **keys_of(layout, flavor), **OBSERVED)
    assert_same_run(tmp_path, two_ranks(flavor, **OBSERVED))
    assert written_samples(tmp_path) == written_samples(two_ranks(flavor, **OBSERVED))


def no_tied_gradient_all_reduce() -> None:
    """Skip the all-reduce of tied gradients between stages."""
    forward_backward.all_reduce_tied_gradients = lambda parameters, pp_mesh: None


def local_loss() -> None:
    run_log.sum_in_order = lambda losses, mesh: losses.sum()


def local_validation_loss() -> None:
    validation.sum_in_order = lambda losses, mesh: losses.sum()


def contiguous_sequence_shards() -> None:
    """Shard the sequence contiguously, although attention expects zig-zag order."""
    original = context_parallel.sequence_shard
    context_parallel.sequence_shard = lambda *args, method: original(*args, method="ulysses")


def contiguous_logits() -> None:
    original = context_parallel.unshard_sequence
    context_parallel.unshard_sequence = lambda *args, method: original(*args, method="ulysses")


@pytest.mark.parametrize(
    ("fault", "layout", "difference"),
    [
        (no_tied_gradient_all_reduce, Layout(2, {PP: 2}), "step 1"),
        (local_validation_loss, Layout(2, {PP: 2}), "validation after step 0"),
        (contiguous_sequence_shards, Layout(2, GATHERED), "step 1"),
        slow(local_loss, Layout(2, {PP: 2}), "step 1"),
        slow(contiguous_logits, Layout(2, GATHERED), "samples.jsonl"),
    ],
)
def test_fault_changes_the_run(
    two_ranks: Reference, tmp_path: Path, fault: Plant, layout: Layout, difference: str
) -> None:
    run_with(fault, tmp_path, layout, keys_of(layout, TIED) | OBSERVED)
    with pytest.raises(AssertionError, match=rf"^{difference}\b"):
        assert_same_run(tmp_path, two_ranks(TIED, **OBSERVED))


QUICK_CHAIN = [
    Layout(2, {MODE: "simple_fsdp"}),
    Layout(2, {PP: 2}),
    Layout(2, GATHERED),
    Layout(4, {PP: 2, TP: 2}),
    Layout(2, INTERLEAVED),
    Layout(1),
]
CHAIN = [
    Layout(2),
    Layout(2, {PP: 2}),
    Layout(2, {CP: 2}),
    Layout(4, {PP: 2, TP: 2}),
    Layout(4, GATHERED | {TP: 2}),
    Layout(4, {TP: 4}),
    Layout(2, INTERLEAVED),
    Layout(4, {REPLICATE: 2}),
    Layout(1),
    Layout(3, {PP: 3}),
    Layout(4, {MODE: "simple_fsdp", TP: 2}),
    Layout(4, {PP: 2, CP: 2}),
    Layout(2, {MODE: "ddp"}),
]


@pytest.mark.parametrize(
    ("flavor", "keys", "chain"),
    [
        pytest.param(TIED, {}, QUICK_CHAIN, id="tied"),
        slow(TIED, {}, CHAIN, id="tied, all"),
        slow(UNTIED, DOCUMENTS, CHAIN, id="documents, all"),
    ],
)
def test_run_changes_its_mesh_on_resume(
    two_ranks: Reference, tmp_path: Path, flavor: str, keys: dict[str, str], chain: list[Layout]
) -> None:
    keys = OBSERVED | keys | {"checkpoint.interval": "1", "checkpoint.async_mode": "async"}
    keys |= {"validation.freq": "6", "validation.steps": "1"}
    steps = 2 * len(chain)
    for start, layout in zip(range(0, steps, 2), chain, strict=True):
        end = start + 2
        for path in tmp_path.glob("rank-*.log"):
            path.unlink()
        keys["validation.sample_tokens"] = "4" if end == steps else "0"
        run(tmp_path, layout.world_size, **keys_of(layout, flavor, end), **keys)
        assert (f"resumed from step {start} of" in log(tmp_path)) == (start > 0)
    assert_same_run(tmp_path, two_ranks(flavor, steps, **keys))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, INTERLEAVED),
        slow(Layout(4, {PP: 2, TP: 2})),
        slow(Layout(4, {PP: 2, CP: 2})),
    ],
    ids=str,
)
def test_pipeline_resumes_bitwise(tmp_path: Path, layout: Layout) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, layout.world_size, **keys_of(layout, TIED))
    for steps in (2, STEPS):
        run(parts, layout.world_size, **keys_of(layout, TIED, steps))
    assert "resumed from step 2" in log(parts)
    assert curve(parts) == curve(whole)
    assert not differences(checkpoints(parts)[0], checkpoints(whole)[0])


def last_stage_skips(*prefixes: str) -> None:
    if os.environ["RANK"] == "1":
        original = Reader.read_data

        def read_data(self: Reader, plan: LoadPlan, planner: LoadPlanner) -> Any:
            items = [i for i in plan.items if not i.storage_index.fqn.startswith(prefixes)]
            return original(self, replace(plan, items=items), planner)

        Reader.read_data = read_data


MOMENTS = partial(last_stage_skips, "optimizer.state.tok_embeddings.")
# The tied weight has two FQNs.
WEIGHT = partial(last_stage_skips, "model.tok_embeddings.", "model.output.")


@pytest.fixture(scope="module")
def two_tied_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run that ended after two steps."""
    folder = tmp_path_factory.mktemp("two_tied_stages")
    run(folder, 2, **keys_of(Layout(2, {PP: 2}), TIED, 2))
    return folder


def test_skipped_moments_change_the_run(
    two_ranks: Reference, two_tied_stages: Path, tmp_path: Path
) -> None:
    """Moments of the tied weight, which the first stage has too."""
    layout = Layout(2, {PP: 2})
    shutil.copytree(two_tied_stages, tmp_path, dirs_exist_ok=True)
    run_with(MOMENTS, tmp_path, layout, keys_of(layout, TIED))
    with pytest.raises(AssertionError, match=r"^step 4\b"):
        assert_same_curve(tmp_path, two_ranks(TIED, **OBSERVED))


@pytest.mark.slow
def test_initial_weights_load_on_any_mesh(tmp_path: Path) -> None:
    run(tmp_path / "first", 2, **keys_of(Layout(2, INTERLEAVED), TIED))
    weights = {"checkpoint.initial_load_path": str(checkpoints(tmp_path / "first")[0])}
    want = tmp_path / "want"
    run(want, 2, **keys_of(Layout(2), TIED), **weights)
    assert curve(want)[1] != curve(tmp_path / "first")[1]
    for layout in (Layout(2, {PP: 2}), Layout(4, GATHERED | {TP: 2})):
        got = tmp_path / str(layout)
        run(got, layout.world_size, **keys_of(layout, TIED), **weights)
        assert_same_curve(got, want)


@pytest.mark.slow
def test_pipeline_is_rolled_back(two_ranks: Reference, tmp_path: Path) -> None:
    keys = OBSERVED | {"numerics.on_spike": "rollback", "checkpoint.interval": "2"}
    layout = Layout(4, INTERLEAVED | {TP: 2})
    run_with(spike_at_step_5, tmp_path, layout, keys_of(layout, TIED, 8) | keys)
    assert "rollback: from step 5 to step 4" in log(tmp_path)
    assert_same_run(tmp_path, two_ranks(TIED, 8, plant=spike_at_step_5, **keys))


def bad_loss(call: int) -> None:
    """Return NaN from this call of the loss function on the last rank."""
    if os.environ["RANK"] == "1":
        original, calls = forward_backward.cross_entropy_sum, 0

        def cross_entropy_sum(*args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return original(*args) * (float("nan") if calls == call else 1.0)

        forward_backward.cross_entropy_sum = cross_entropy_sum


def bad_gradient() -> None:
    """Put NaN into the gradient of the last rank's first parameter in step 3."""
    if os.environ["RANK"] == "1":
        original, calls = train_step.local_norms, 0

        def local_norms(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
            nonlocal calls
            calls += 1
            if calls == 3:
                to_local(parameters[0].grad).view(-1)[0] = torch.nan
            return original(parameters)

        train_step.local_norms = local_norms


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [
        (bad_gradient, "the gradient of layers.2.attention_norm.weight"),
        # Four microbatches per step.
        slow(partial(bad_loss, 11), "the loss"),
    ],
    ids=["gradient", "loss"],
)
def test_nonfinite_step_of_a_stage_is_skipped_on_all(
    two_ranks: Reference, tmp_path: Path, fault: Plant, culprit: str
) -> None:
    skips, layout = {"numerics.on_nonfinite": "skip"}, Layout(2, {PP: 2})
    run_with(fault, tmp_path, layout, keys_of(layout) | skips)
    message = f"step 3: {culprit} is not finite on some rank; 1 updates skipped since, 1 in total"
    for path in tmp_path.glob("rank-*.log"):
        assert path.read_text().count("is not finite") == path.read_text().count(message) == 1
    # The optimizers of both stages have made one update less than there are steps.
    saved = tensors(checkpoints(tmp_path)[0])
    assert {t.item() for fqn, t in saved.items() if fqn.endswith(".step")} == {STEPS - 1}
    # Two microbatches per step, so call 5 is in step 3 too.
    got, want = curve(tmp_path), curve(two_ranks(UNTIED, plant=partial(bad_loss, 5), **skips))
    for step in (1, 2, 4):
        assert got[step] == pytest.approx(want[step], rel=1e-9)
    assert (got[3][1], want[3][1]) == (None, None)


def drift() -> None:
    """Change the last rank's first weight in step 3."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        original, calls = train_step.clip_grad_norm_, 0

        def clip(parameters: list[nn.Parameter], *args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:
                to_local(parameters[0].detach()).view(-1)[0] += 1e-3
            return original(parameters, *args, **kwargs)

        train_step.clip_grad_norm_ = clip


@pytest.mark.parametrize(
    ("flavor", "layout", "message", "by"),
    [
        (
            UNTIED,
            Layout(4, {PP: 2, REPLICATE: 2}),
            "replicas along dp_replicate differ, first in layers.2.attention_norm.weight",
            [False, False, True, True],
        ),
        (
            TIED,
            Layout(2, {PP: 2}),
            "the first and the last stage differ in tok_embeddings.weight",
            [True, True],
        ),
    ],
    ids=["copies", "tied"],
)
def test_replicas_of_every_stage_are_compared(
    two_ranks: Reference, tmp_path: Path, flavor: str, layout: Layout, message: str, by: list[bool]
) -> None:
    keys = keys_of(layout, flavor) | {"numerics.replica_check_freq": "1"}
    run_with(drift, tmp_path, layout, keys, want=exit_codes.FAILED)
    logs = [path.read_text() for path in sorted(tmp_path.glob("rank-*.log"))]
    assert [message in text for text in logs] == by
    # Equal replicas passed at the start and after the first two steps.
    got, want = curve(tmp_path), curve(two_ranks(flavor, **OBSERVED))
    assert list(got) == [1, 2, 3]
    for step, values in got.items():
        assert values == pytest.approx(want[step], rel=1e-9), f"step {step}"


@pytest.mark.parametrize("fault", [WEIGHT, slow(MOMENTS)], ids=["weight", "moments"])
def test_replicas_are_compared_after_resume(
    two_tied_stages: Path, tmp_path: Path, fault: Plant
) -> None:
    layout, often = Layout(2, {PP: 2}), {"numerics.replica_check_freq": "1"}
    shutil.copytree(two_tied_stages, tmp_path, dirs_exist_ok=True)
    run_with(fault, tmp_path, layout, keys_of(layout, TIED) | often, want=exit_codes.FAILED)
    for path in tmp_path.glob("rank-*.log"):
        message = "the first and the last stage differ in tok_embeddings.weight"
        assert message in path.read_text()
    # The weight is detected before the first step, the moments in it.
    assert max(curve(tmp_path)) == (2 if fault is WEIGHT else 3)


class EqualBlocks:
    """Clock on which every block takes one second."""

    def __init__(self) -> None:
        self.total = 0.0

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self.total += 1.0

    def pop_elapsed(self) -> list[float]:
        total, self.total = self.total, 0.0
        return [total]


def equal_blocks() -> None:
    stragglers._HostClock = EqualBlocks


@pytest.mark.parametrize(
    "layout",
    [Layout(3, {PP: 3}), slow(Layout(2, {PP: 2})), slow(Layout(2, INTERLEAVED))],
    ids=str,
)
def test_stages_of_equal_blocks_have_equal_speed(tmp_path: Path, layout: Layout) -> None:
    """The number of blocks per stage does not matter."""
    keys = keys_of(layout) | {"metrics.straggler_window": "1"}
    run_with(equal_blocks, tmp_path, layout, keys)
    assert {record["slowest_over_median"] for record in records(tmp_path)} == {1.0}
    assert "is slow" not in log(tmp_path)


def slow_blocks() -> None:
    """Delay each block of the last rank, by more than a busy machine delays the others'."""
    original = stragglers.Stragglers.__init__

    def init(self: Any, blocks: Any, **keys: Any) -> None:
        original(self, blocks, **keys)
        for block in blocks:
            block.register_forward_pre_hook(lambda *args: time.sleep(0.3))

    if os.environ["RANK"] == "1":
        stragglers.Stragglers.__init__ = init


def test_slow_stage_is_reported(tmp_path: Path) -> None:
    """The stage that waits for the slow one is not reported."""
    layout = Layout(2, {PP: 2, MICROBATCH_SIZE: 2})
    keys = keys_of(layout, steps=6) | {"metrics.straggler_window": "2"}
    run_with(slow_blocks, tmp_path, layout, keys)
    assert re.findall(r"rank (\d) on \S+ is slow", log(tmp_path)) == ["1", "1"]
    assert records(tmp_path)[-1]["slowest_rank"] == 1
