"""The whole program on any mesh: the model that it trains is the same, in float64.

So is what it validates, writes and consumes, and what becomes of it on another mesh.
"""

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import forward_backward
import train
from checkpoint.states import ModelState, OptimizerState
from metrics import stragglers
from parallelisms.materialize import canonical_fqn
from runtime import exit_codes
from runtime.distributed import local_part
from tests.layouts import CP, METHOD, MODE, PP, REPLICATE, SCHEDULE, TP
from tests.reliability.forked import checkpoints, codes, curve, differences, log, run, started
from tests.reliability.forked import tensors as saved_tensors
from tests.test_train import records
from tools import check_ledger

FLAVORS = ("debugmodel", "debugmodel_tied")
KEYS = {
    "lr_scheduler.total_steps": "40",
    "validation.enable": "true",
    "validation.freq": "3",
    # More than fit in a sequence: the window moves.
    "validation.sample_tokens": "32",
    "validation.sample_prompt": "def ",
    "metrics.enable_ledger": "true",
}
SHORT, LONG = 6, 20
TWO_STAGES = {PP: "2"}
INTERLEAVED = {PP: "2", SCHEDULE: "Interleaved1F1B"}
TWO_PARTS, GATHERED = {CP: "2"}, {CP: "2", METHOD: "allgather"}
SELECTIVE = {"activation_checkpoint.mode": "selective"}
Reference = Callable[[str, int], Path]


def options(parallelism: dict[str, str], **others: str) -> dict[str, str]:
    """As overrides of the debug config."""
    return KEYS | {f"parallelism.{key}": value for key, value in parallelism.items()} | others


def steps(count: int) -> dict[str, str]:
    return {"training.steps": str(count)}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Folder of an uninterrupted run with FSDP, of that flavor and so many steps."""

    @cache
    def made(flavor: str, n_steps: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{flavor}-{n_steps}")
        run(folder, 2, **options({}, **steps(n_steps), **{"model.flavor": flavor}))
        return folder

    return made


def assert_same_run(folder: Path, want: Path) -> None:
    """The curves, the text on every rank, and each row of each step."""
    got, expected = curve(folder), curve(want)
    assert list(got) == list(expected)
    for step, values in expected.items():
        assert got[step] == pytest.approx(values, rel=1e-9), f"step {step}"
    validated = validation_curve(folder)
    assert list(validated) == list(validation_curve(want))
    assert validated == pytest.approx(validation_curve(want), rel=1e-9), "validation"
    assert set(texts(folder)) == set(texts(want)), "text"
    assert (
        check_ledger.main([str(folder / "debug_model"), "--against", str(want / "debug_model")])
        == 0
    ), "ledger"


def validation_curve(folder: Path) -> dict[int, float]:
    found = records(folder)
    return {r["step"]: r["validation_loss"] for r in found if "validation_loss" in r}


def texts(folder: Path) -> list[str]:
    """What the model writes at the end, as each rank has it."""
    logs = [path.read_text() for path in sorted(folder.glob("rank-*.log"))]
    after = [text.partition("the model writes:\n")[2] for text in logs]
    # The next line of the log begins with the time.
    return [
        re.split(r"^\d\d:\d\d:\d\d ", text, maxsplit=1, flags=re.MULTILINE)[0] for text in after
    ]


def test_the_reference_has_what_is_compared(two_ranks: Reference) -> None:
    folder = two_ranks(FLAVORS[0], SHORT)
    assert list(curve(folder)) == list(range(1, SHORT + 1))
    assert list(validation_curve(folder)) == [0, 3, 6]
    first, second = texts(folder)
    assert first == second
    assert first.startswith("def ")
    assert len(first) > len("def ")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


LAYOUTS = [
    (1, {}),
    (4, {TP: "2"}),
    (4, {REPLICATE: "2"}),
    (2, {MODE: "ddp"}),
    (2, {MODE: "simple_fsdp"}),
    (2, TWO_PARTS),
    (2, GATHERED),
    (2, TWO_STAGES),
    (2, INTERLEAVED),
    (4, TWO_STAGES | {TP: "2"}),
    (4, TWO_STAGES | TWO_PARTS),
    (2, TWO_STAGES | {SCHEDULE: "GPipe"}),
    (2, TWO_STAGES | {SCHEDULE: "InterleavedZeroBubble"}),
    (2, TWO_STAGES | {"pipeline_parallel_microbatch_size": "2"}),
    (3, {PP: "3"}),
    (4, {PP: "4"}),
    (4, TWO_STAGES | {MODE: "ddp"}),
    (4, TWO_STAGES | {MODE: "simple_fsdp"}),
    (4, TWO_STAGES | {REPLICATE: "2"}),
    (4, INTERLEAVED | {TP: "2"}),
    (4, INTERLEAVED | GATHERED),
    (4, {TP: "4"}),
    (4, {CP: "4"}),
    (4, {CP: "4", METHOD: "allgather"}),
    (4, {TP: "2"} | TWO_PARTS),
    (4, {TP: "2"} | GATHERED),
    (8, TWO_STAGES | TWO_PARTS | {TP: "2"}),
    (8, INTERLEAVED | GATHERED | {TP: "2"}),
]


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize(("n_ranks", "parallelism"), LAYOUTS, ids=str)
def test_any_mesh_trains_the_same_model(
    two_ranks: Reference, tmp_path: Path, flavor: str, n_ranks: int, parallelism: dict[str, str]
) -> None:
    run(tmp_path, n_ranks, **options(parallelism, **steps(SHORT), **{"model.flavor": flavor}))
    assert_same_run(tmp_path, two_ranks(flavor, SHORT))
