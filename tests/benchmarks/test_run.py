"""End-to-end tests of the benchmark harness on tiny shapes: rows, resume, errors, tables."""

import json
import multiprocessing
import re
import signal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loss, published, run, step, table
from benchmarks.peers import PACKAGES, PEERS
from benchmarks.rows import (
    MEASURED,
    append_rows,
    cpu_name,
    environment,
    is_measured,
    newest,
    read_rows,
    tables,
)
from benchmarks.run import load_cases, main
from benchmarks.turns import Loop, LoopError, Turn, Turns
from config.job_config import Compile
from planner.roofline import FIT
from tests.lib.marks import slow
from tests.lib.patience import PATIENCE_SECONDS

TINY = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 96,
    "vocab_size": 320,
}  # fmt: skip
SHAPE = [part for key, value in TINY.items() for part in (f"--shape.{key}", str(value))]


def test_interrupted_benchmark_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["h200_tiny", "--out", str(out), "--commit", "abc"]
    assert main([*command, "--budget", "0"]) == 3
    assert read_rows(out) == []
    assert main([*command, "--only", "9B"]) == 2
    assert (
        "--only 9B: no such case; there are: 'ceilings', '8B, bfloat16" in capsys.readouterr().err
    )
    assert main([*command, "--only", "8B, bfloat16"]) == 0
    (row,) = read_rows(out)
    assert set(MEASURED) | set(environment("abc")) <= row.keys()
    assert row["settings"]["keys"]["training.dtype"] == "bfloat16"
    assert row["commit"] == "abc"
    assert row["problem"] is None
    assert row["tokens_per_second"] > 0
    assert row["peak_memory_gib"] > 0
    # A kill during a write leaves a torn line.
    out.write_text(out.read_text() + '{"config": "h2')
    assert main([*command]) == 1
    output = capsys.readouterr().out
    assert "\na key that there is not: failed: " in output
    assert "\n8B, 2 ranks: done\n" in output
    assert "\na package that there is not: done\n" in output
    assert "8B, bfloat16 weights: already in" in output
    rows = read_rows(out)
    assert [r["case"] for r in rows if r["what"] == "train"].count(row["case"]) == 1
    (odd,) = (r for r in rows if r["case"] == "a key that there is not")
    assert "float8" in odd["problem"]
    (sharded,) = (r for r in rows if r["case"] == "8B, 2 ranks")
    assert sharded["problem"] is None
    (absent,) = (r for r in rows if r["case"] == "a package that there is not")
    assert "no-such-package not installed" in absent["problem"]
    (experts,) = (r for r in rows if r["case"] == "Qwen3-Next")
    assert experts["parameters"] > 0 < experts["tokens_per_second"]
    (copy,) = (r for r in rows if r["what"] == "copy, 1 MiB")
    assert copy["gb_per_second"] > 0
    # Rows of another commit do not count.
    assert main([*command[:-1], "def", "--only", "ceilings"]) == 0
    assert len(read_rows(out)) == len(rows) + 3


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("checkpoint", [*SHAPE, "--rounds", "1", "--only", "1 rank"]),
        ("loss", ["--tokens", "64", "--vocab_size", "256", "--turns", "1", "--only", "4096"]),
        slow("scale", ["--turns", "1", "--shape.dim", "64", "--only", "2 ranks"]),
        slow("spinning", ["--steps", "1", "--spin_counts", "[0]", "--busy", "[1]"]),
        slow("startup", ["--repetitions", "1"]),
        slow("data", ["--turns", "2", "--documents", "50", "--waiting_steps", "2"]),
    ],
)  # fmt: skip
def test_every_column_is_measured(
    name: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inductor, which tests/optim/test_loss.py compiles the loss with, would take ten seconds.
    monkeypatch.setattr(loss, "Compile", partial(Compile, backend="aot_eager"))
    out = tmp_path / "rows.jsonl"
    assert main([name, "--out", str(out), *overrides]) == 0
    rows = read_rows(out)
    assert rows
    assert not [row["problem"] for row in rows if row["problem"]]
    columns = run.tomllib.loads((run.CONFIGS / f"{name}.toml").read_text())["columns"]
    assert not {c for c in columns if all(row.get(c) is None for row in rows)}


def test_missing_peer_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "installed_version", lambda name: None)
    case = step.Case(
        loops=["bare", "torchtitan"], shape=TINY, seq_len=32, batch_size=1, dtype="float32",
        turns=1, warmup=0,
    )  # fmt: skip
    bare, peer = step.run(case)
    assert bare["tokens_per_second"] > 0
    assert peer == {"what": "torchtitan", "problem": "skipped: torchtitan not installed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_peer_trains_the_same_model(name: str) -> None:
    if missing := [package for package in PACKAGES[name] if find_spec(package) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")
    case = step.Case(
        loops=["bare", name], shape=TINY, seq_len=32, batch_size=1, dtype="float32", turns=1,
        warmup=0,
    )  # fmt: skip
    _, peer = step.run(case)
    assert peer["problem"] is None
    assert peer["packages"].keys() == set(PACKAGES[name])


def test_turns_of_all_restarts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Turn] = []
    monkeypatch.setattr(step, "measured", lambda case, first, turns: taken.extend(turns) or {})
    case = step.Case(
        loops=["bare"], shape=TINY, seq_len=32, batch_size=1, dtype="float32", restarts=2,
        turns=3, warmup=1,
    )  # fmt: skip
    assert [row["what"] for row in step.run(case)] == ["bare"]
    assert len({turn.seconds for turn in taken}) == 6


def test_different_model_is_detected() -> None:
    assert step.parity_problem([1.0, 2.0], [1.0, 2.00001]) is None
    assert "another model" in str(step.parity_problem([1.0, 2.0], [1.0, 2.1]))
    assert step.parity_problem([1.0], None) is None


def test_cpu_name_has_family_and_model(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    names = set()
    for family, model in ((25, 17), (26, 2)):
        one = f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: EPYC\n"
        cpuinfo.write_text(f"{one}\n{one}")
        names.add(cpu_name(cpuinfo))
    assert names == {"EPYC, family 25 model 17", "EPYC, family 26 model 2"}
    assert cpu_name(tmp_path / "not there")


def test_ratio_compares_equal_turns() -> None:
    """A slow turn of the machine slows both loops and leaves the ratio unchanged."""
    bare = [Turn(seconds, 2 * seconds, 0, 0, None) for seconds in (1.0, 9.0, 1.0)]
    own = [Turn(2 * turn.seconds, turn.cpu_seconds, 0, 0, None) for turn in bare]
    assert step.compared(bare, own) == {"ratio_wall": 0.5, "ratio_cpu": 1.0}


def failing(turns: Turns) -> None:
    turns.next_step()
    raise RuntimeError("out of | memory")


def hanging(_: Turns) -> None:
    signal.pause()


def test_failed_loop_raises_and_hung_loop_times_out() -> None:
    far = run.time.monotonic() + PATIENCE_SECONDS
    with pytest.raises(LoopError) as caught, Loop(failing, deadline=far) as loop:
        loop.turn()
    assert caught.value.problem == "RuntimeError: out of / memory"
    with pytest.raises(TimeoutError):
        Loop(hanging, deadline=run.time.monotonic() + 0.1)


def locking(turns: Turns) -> None:
    turns.note = multiprocessing.Lock()._semlock.name  # type: ignore[attr-defined]
    turns.next_step()


def test_locks_of_a_loop_leave_no_files() -> None:
    # With a name, the lock is a file, about which Python warns once the loop has ended.
    with Loop(locking, deadline=run.time.monotonic() + PATIENCE_SECONDS) as loop:
        assert loop.ready is None


def test_committed_configs_are_valid() -> None:
    for path in run.CONFIGS.glob("*.toml"):
        assert load_cases(path.stem, {})


GOOD = 'columns = ["what"]\n[[cases]]\nname = "a"\nbenchmark = "loss"\ntokens = 1\nvocab_size = 1\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("columns = [", "bad.toml: "),
        ("columns = []", "no cases"),
        (GOOD, "turns: Field required"),
        (GOOD + "turns = 1\nturnz = 1", "turnz: Extra inputs are not permitted"),
        (GOOD + 'turns = "many"', "turns: Input should be a valid integer"),
        (GOOD.replace('"loss"', '"lost"'), "'lost' is not one of ceilings, "),
        ("kolumns = 1\n" + GOOD, "kolumns"),
        (GOOD.replace("name", "nome"), "needs a unique name"),
    ],
)
def test_config_error_names_the_key(
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "CONFIGS", tmp_path)
    (tmp_path / "bad.toml").write_text(text)
    assert main(["bad"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps"], "'steps' is not a benchmark: checkpoint, "),
        (["step", "--turns"], "--turns needs a value"),
        (["step", "turns=3"], "'turns' is not --key"),
        (["step", "--turnz=3"], "case 'float32': turnz: Extra inputs"),
    ],
)
def test_command_line_error_names_the_argument(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_overrides_are_parsed_into_tables() -> None:
    found = run.parse_overrides(["--turns", "5", "--keys.compile.enable=true", "--dtype", "bf16"])
    assert found == {"turns": 5, "keys": {"compile.enable": True}, "dtype": "bf16"}
    assert [case["tokens"] for case in load_cases("loss", {"tokens": 7})] == [7, 7]


def row(what: str, **values: Any) -> dict[str, Any]:
    fields = {"config": "c", "case": "a", "what": what, "problem": None} | environment("abc")
    return fields | values


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({}, True),
        ({"problem": "skipped: torchtitan not installed"}, False),
        ({"problem": "skipped: not on this CPU"}, True),
        ({"problem": "out of memory"}, False),
        ({"commit": "abd"}, False),
        ({"cores": 0}, False),
    ],
)
def test_only_a_result_of_this_commit_is_not_measured_again(
    fields: dict[str, Any], counts: bool
) -> None:
    here, settings = environment("abc"), {"name": "a"}
    rows = [row("x", settings=settings) | fields]
    assert is_measured(rows, "c", settings, here) is counts
    # Of a case with two rows both must be there; the newer one of a name counts.
    others = [row("y", settings=settings), row("z", settings=settings)]
    is_other = fields.keys() & {"commit", "cores"}
    assert is_measured([*others, *rows], "c", settings, here) is (counts or bool(is_other))
    assert is_measured([*rows, row("x", settings=settings)], "c", settings, here)
    rows = [each | {"commit": "abc+"} for each in rows]
    assert not is_measured(rows, "c", settings, here | {"commit": "abc+"})


def test_table_shows_the_newest_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    append_rows(out, [row("x", mfu_palm=0.5), row("y", ratio_wall=0.97349)])
    append_rows(out, [row("x", mfu_palm=0.25, problem="cold")])
    rows = read_rows(out)
    assert [r["what"] for r in newest(rows)] == ["y", "x"]
    *_, y, x = tables(rows, ["what", "mfu_palm", "ratio_wall"]).splitlines()
    assert (y, x) == ("| y |  | 0.973 |  |", "| x | 25.0% |  | cold |")


def test_torn_line_is_skipped(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    append_rows(out, [row("x")])
    with out.open("a") as file:
        file.write('{"what": "to')
    append_rows(out, [row("y")])
    append_rows(out, [row("z")])
    assert [r["what"] for r in read_rows(out)] == ["x", "y", "z"]
    assert "\n\n" not in out.read_text()


def test_each_machine_has_its_own_table() -> None:
    rows = [row("x", cores=2), row("x", cores=4), row("y", cores=2)]
    first, *first_table, second, _, _, _, x = tables(rows, ["what"]).split("\n")
    assert "2 cores" in first
    assert first_table == ["", "| what |", "| --- |", "| x |", "| y |", ""]
    assert "4 cores" in second
    assert x == "| x |"


def test_documentation_tables_are_rendered_rows() -> None:
    texts = [page.read_text() for page in table.PAGES]
    named = {name for text in texts for _, name, _ in table.MARKED.findall(text)}
    assert named >= {path.name for path in table.RESULTS.glob("*.jsonl")}
    assert [table.rendered(text) for text in texts] == texts, "python -m benchmarks.table"
    for path in table.RESULTS.glob("*.jsonl"):
        assert all(json.loads(line)["commit"] for line in path.read_text().splitlines())


def test_published_runs_are_rendered_and_their_error_is_that_of_plans() -> None:
    table = published.table()
    assert table in published.PAGE.read_text(), "python -m benchmarks.published"
    found = re.search(r"tokens/s ([\d.]+ %)", table)
    assert found is not None
    assert f"the median error is {found[1]}" in FIT
