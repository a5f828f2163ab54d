"""The command's table, advice and errors, from traces made by hand."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from config import JobConfig, dump_toml
from runtime import exit_codes
from runtime.provenance import write_attempt, write_content
from tests.lib.attempts import attempt_of
from tests.lib.traces import (
    Event,
    annotation,
    device_step,
    kernel,
    nccl,
    step,
    write,
)
from tools import profile_summary

EXPECTED = """\
step 8, 2 of 2 ranks, GPU, nccl: {folder}

rank  step s  compute  exposed    data   host  communication   waits
0        0.1   60.0 %   25.0 %  10.0 %  5.0 %         35.0 %  20.0 %
1        0.1   80.0 %    5.0 %  10.0 %  5.0 %         15.0 %   0.0 %
waits: within collectives, for the rank that joined last

kernel, rank 1  per step  ms of a step   share
gemm                   1        80.000  80.0 %

collective                             per step  ms of a step  exposed ms
_allgather_base (mesh_dp_shard)               1        15.000       5.000

rank 1 came last in 1 of 1 collectives, and the others wait 20.0 % of a step for it:"""


def traced_run(folder: Path, *, number: int = 8, **changes: str) -> Path:
    """A run of two ranks, of which rank 1 computes 20 ms longer; both then gather until 95."""
    traces = folder / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    for rank, end in ((0, 70), (1, 90)):
        events: list[Event] = [
            step(number, 0, 100), annotation("data wait", 0, 10), device_step(number, 10, 95),
            kernel(10, end), nccl(end - 10, 95),
        ]  # fmt: skip
        write(traces / f"trace-step-{number:08d}-rank{rank}.json.gz", *events, rank=rank)
    (folder / "config.toml").write_text(dump_toml(JobConfig()))
    return folder


def lines_of(arguments: list[Path], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = profile_summary.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_newest_step_of_a_run_is_summarized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = traced_run(traced_run(tmp_path, number=4))
    (run / "traces" / "memory-step-00000012-rank0.pickle").touch()
    code, output, errors = lines_of([run], capsys)
    assert (code, errors) == (exit_codes.DONE, "")
    words = [line.split() for line in EXPECTED.format(folder=run / "traces").splitlines()]
    found = [line.split() for line in output.splitlines()]
    assert [line[: len(own)] for line, own in zip(found, words, strict=False)] == words
    assert "waiting for data, 10.0 %" in output
    assert "exposed communication, 15.0 %" in output


def test_step_of_a_repeated_timeline_is_the_newest(tmp_path: Path) -> None:
    """After a rollback, smaller steps are traced."""
    run = traced_run(traced_run(tmp_path), number=4)
    for path in (run / "traces").glob("trace-step-00000008-*"):
        os.utime(path, (0, 0))
    assert {path.name[:19] for path in profile_summary.trace_files(run)} == {"trace-step-00000004"}


def test_advice_knows_the_configuration_of_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of a later start, which may have another mesh."""
    run = traced_run(tmp_path)
    before = lines_of([run], capsys)
    assert "parallelism.fsdp_reduce_gradients" in before[1]
    other = JobConfig.model_validate({"parallelism": {"data_parallel": "simple_fsdp"}})
    (run / "config.toml").write_text(dump_toml(other))
    assert "parallelism.fsdp_reduce_gradients" not in lines_of([run], capsys)[1]
    folder = run / "provenance"
    folder.mkdir()
    config = write_content(folder, "config", "toml", dump_toml(JobConfig()))
    write_attempt(folder, replace(attempt_of(folder), config=config))
    assert lines_of([run], capsys) == before


def test_one_trace_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = traced_run(tmp_path) / "traces" / "trace-step-00000008-rank1.json.gz"
    moved = tmp_path / "mine.gz"
    trace.rename(moved)
    code, output, _ = lines_of([moved], capsys)
    assert code == exit_codes.DONE
    assert "1 of 2 ranks" in output
    assert "came last" not in output


def test_traces_of_a_start_with_other_ranks_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = traced_run(tmp_path)
    _, before, _ = lines_of([run], capsys)
    traces = [run / "traces" / f"trace-step-00000008-rank{rank}.json.gz" for rank in (2, 3)]
    for rank, path in zip((2, 3), traces, strict=True):
        write(path, step(8, 0, 50), kernel(10, 20), rank=rank, world_size=4)
        os.utime(path, (0, 0))
    code, output, _ = lines_of([run], capsys)
    assert (code, output) == (
        exit_codes.DONE, f"2 traces of another start are skipped\n{before}"
    )  # fmt: skip
    code, _, errors = lines_of([*run.glob("traces/*8-rank1.json.gz"), *traces], capsys)
    assert code == exit_codes.BAD_CONFIG
    assert "not of the same number of ranks" in errors


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = traced_run(tmp_path / "run"), traced_run(tmp_path / "other", number=4)
    (tmp_path / "new").mkdir()
    first, second = (run / "traces" / f"trace-step-00000008-rank{rank}.json.gz" for rank in (0, 1))
    earlier = other / "traces" / "trace-step-00000004-rank0.json.gz"
    for arguments, message in (
        ([], "required: RUN_OR_TRACE"),
        ([tmp_path / "none"], "No such file"),
        ([tmp_path / "new"], "has no traces; write some with --profiling.enable_trace true, or"),
        ([run / "config.toml"], 'no "traceEvents"'),
        ([first, first], "both of rank 0"),
        ([earlier, second], "not of the same steps"),
    ):
        code, _, errors = lines_of(arguments, capsys)
        assert code == exit_codes.BAD_CONFIG
        assert message in errors
        assert "Traceback" not in errors
