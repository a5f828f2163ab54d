"""Troubles planted in a whole run: its log and its report name each, and none in a healthy run."""

import re
from pathlib import Path

from runtime import exit_codes
from runtime.filesystem import RUN_FILES, RUN_FOLDERS
from tests.lib.launch import records, start
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.troubles import LAST_STEP
from tools.report import page_data

KEYS = {
    "training.steps": "60",
    "training.global_batch_size": "4",
    "lr_scheduler.total_steps": "60",
}
TROUBLES = {
    "checkpoint.interval": "40",
    "comm.train_timeout_seconds": "10",
    "training.gc_freq": "2",
    "data.source": "tests.lib.troubles:SlowTexts",
    "model.name": "tests.lib.troubles:TROUBLED",
    "metrics.straggler_window": "3",
    "lr_scheduler.decay_type": "tests.lib.troubles:too_high",
}
NAMES = {
    "slow data": r"warning slow: rank \d waited for data in \d+ % of the time",
    "slow save": r"warning slow: saving a checkpoint took \d+ s, \d+ % of the time",
    "slow rank": r"warning rank 1 on \S+ is slow: its blocks take [\d.]+ times the median",
    "recompilation": r"alarm ALARM: torch.compile recompiles in every step.*ones_like",
    "leak": r"warning memory leak: host memory of rank \d on \S+ and 1 more grows by 8.* per step",
    "divergence": r"alarm ALARM: the loss diverges: [\d.]+ from step \d+ on, after [\d.]+ up to",
    "hang": rf"failure failed: rank 1 \S+ did not join the others: in step {LAST_STEP} at tests",
}


def train(folder: Path, n_ranks: int, code: int, **keys: str) -> tuple[str, list[str]]:
    """Train; return the output, and the marks of the report that are no usual events."""
    process = start(folder, n_ranks, **KEYS | keys)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code, output
    marks = page_data([folder / "debug_model"])["marks"]
    usual = ("checkpoint", "end")
    return output, [f"{m['kind']} {m['text']}" for m in marks if m["kind"] not in usual]


def test_each_trouble_is_named_once_in_log_and_report(tmp_path: Path) -> None:
    output, marks = train(tmp_path, 2, exit_codes.FAILED, **TROUBLES)
    found = {trouble: [m for m in marks if re.match(text, m)] for trouble, text in NAMES.items()}
    assert {trouble: len(named) for trouble, named in found.items()} == dict.fromkeys(NAMES, 1), (
        "\n".join(marks)
    )
    assert re.search(r"^  rank 1 never entered gloo:\w+ of ", output, re.MULTILINE), output
    for (mark,) in found.values():
        assert output.count(mark.partition(" ")[2].removeprefix("failed: ")) == 1, output


def test_nothing_is_named_in_a_healthy_run(tmp_path: Path) -> None:
    keys = {
        # More than the losses that a divergence takes.
        "training.steps": "30",
        "metrics.trackers": '["tensorboard"]',
        "metrics.enable_ledger": "true",
        "validation.sample_tokens": "8",
        # Steps so long that a busy machine's reads of data are no tenth of them.
        "training.seq_len": "128",
        "model.args.n_layers": "4",
    }
    # One rank: other programs may slow one of two.
    output, marks = train(tmp_path, 1, exit_codes.DONE, **keys)
    assert marks == []
    assert not re.search("ALARM|warning|slow|leak|diverge", output), output
    assert len(records(tmp_path)) == 30 + 2, "steps and validations"
    # The sample of the last step is shown once.
    assert re.findall(r"step +(\d+)  sample: | sample:$", output, re.MULTILINE) == ["0", ""]
    written = {path.name for path in (tmp_path / "debug_model").iterdir()}
    assert written <= {*RUN_FILES, *RUN_FOLDERS}, "all that a run writes is checked for links"
