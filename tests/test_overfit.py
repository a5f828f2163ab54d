"""A run overfits a few sentences."""

from pathlib import Path

import pytest

from tests.lib.forked import run
from tests.lib.launch import curve, records
from tests.lib.layouts import CP, EP
from tests.lib.marks import slow

TEXT = "Each of the experts is asked about some of these letters, and none is asked about all.\n"
KEYS = {
    "training.steps": "60",
    "training.seq_len": "64",
    "training.local_batch_size": "4",
    "training.dtype": "float32",
    "training.mixed_precision_param": "float32",
    "lr_scheduler.total_steps": "60",
    "checkpoint.enable": "false",
    "data.source": "files",
}
EXPERTS = {f"parallelism.{EP}": "2"}


@pytest.mark.parametrize(
    ("name", "parallelism"),
    [
        ("qwen3_moe", EXPERTS),
        slow("qwen3_next", EXPERTS | {f"parallelism.{CP}": "2"}),
    ],
)
def test_small_dataset_is_overfitted(
    name: str, parallelism: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    path = {"data.path": str(tmp_path / "*.txt"), "model.name": name}
    run(tmp_path / "run", 2, **KEYS, **parallelism, **path)
    losses = [loss for loss, _ in curve(tmp_path / "run").values()]
    # First near log(256); in the end only the first bytes of each sequence are unpredictable.
    assert losses[0] > 5.0
    assert losses[-1] < 0.2
    # Top 2 of 8 experts: 1.0 is an even load, 4.0 means that all tokens go to the same two.
    loads = [record["expert_load"] for record in records(tmp_path / "run") if "loss" in record]
    assert all(1.0 < load <= 4.0 for load in loads)
