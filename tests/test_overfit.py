"""A run learns a few sentences by heart."""

from pathlib import Path

import pytest

from tests.layouts import CP, EP
from tests.reliability.forked import curve, run
from tests.test_train import records

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
        pytest.param("qwen3_next", EXPERTS | {f"parallelism.{CP}": "2"}, marks=pytest.mark.slow),
    ],
)
def test_a_small_set_is_learned_by_heart(
    name: str, parallelism: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    path = {"data.path": str(tmp_path / "*.txt"), "model.name": name}
    run(tmp_path / "run", 2, **KEYS, **parallelism, **path)
    losses = [loss for loss, _ in curve(tmp_path / "run").values()]
    # Of 256 bytes, then of this text: what is left are the first bytes of each sequence.
    assert losses[0] > 5.0
    assert losses[-1] < 0.2
    # Two of eight are chosen: from an even load to all for the same two.
    loads = [record["expert_load"] for record in records(tmp_path / "run") if "loss" in record]
    assert all(1.0 < load <= 4.0 for load in loads)
