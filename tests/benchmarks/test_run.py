"""The harness from end to end, on shapes of seconds: rows, cut runs, bad input, tables."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run, step, table
from benchmarks.peers import PACKAGES, PEERS
from benchmarks.rows import (
    MEASURED,
    append_rows,
    cpu_name,
    environment,
    newest,
    read_rows,
    tables,
)
from benchmarks.run import load_cases, main
from benchmarks.turns import Loop, LoopError, Turn, Turns

TINY = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 96,
    "vocab_size": 320,
}  # fmt: skip
SHAPE = [part for key, value in TINY.items() for part in (f"--shape.{key}", str(value))]


def test_a_cut_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["h200_tiny", "--out", str(out), "--commit", "abc"]
    assert main([*command, "--budget", "0"]) == 3
    assert read_rows(out) == []
    assert main([*command, "--only", "8B, bfloat16"]) == 0
    (row,) = read_rows(out)
    assert set(MEASURED) | set(environment("abc")) <= row.keys()
    assert row["settings"]["keys"]["training.dtype"] == "bfloat16"
    assert row["commit"] == "abc"
    assert row["problem"] is None
    assert row["tokens_per_second"] > 0
    assert row["peak_memory_gib"] > 0
    # Killed while it wrote.
    out.write_text(out.read_text() + '{"config": "h2')
    assert main([*command]) == 0
    told = capsys.readouterr().out
    assert "8B, bfloat16 weights: already in" in told
    rows = read_rows(out)
    assert [r["case"] for r in rows if r["what"] == "train"].count(row["case"]) == 1
    (odd,) = (r for r in rows if r["case"] == "a key that there is not")
    assert "float8" in odd["problem"]
    (copy,) = (r for r in rows if r["what"] == "copy, 1 MiB")
    assert copy["gb_per_second"] > 0
    # Of another commit nothing is known.
    assert main([*command[:-1], "def", "--only", "ceilings"]) == 0
    assert len(read_rows(out)) == len(rows) + 3


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("checkpoint", [*SHAPE, "--rounds", "1", "--only", "1 rank"]),
        ("loss", ["--tokens", "64", "--vocab_size", "256", "--turns", "1", "--only", "4096"]),
        ("scale", ["--turns", "1", "--shape.dim", "64", "--only", "2 ranks"]),
        pytest.param("startup", ["--repetitions", "1"], marks=pytest.mark.slow),
        pytest.param(
            "data", ["--turns", "2", "--documents", "50", "--waiting_steps", "2"],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_every_column_is_measured(name: str, overrides: list[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert main([name, "--out", str(out), *overrides]) == 0
    rows = read_rows(out)
    assert rows
    assert not [row["problem"] for row in rows if row["problem"]]
    columns = run.tomllib.loads((run.CONFIGS / f"{name}.toml").read_text())["columns"]
    assert not {c for c in columns if all(row.get(c) is None for row in rows)}


def test_a_peer_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "find_spec", lambda name: None)
    case = step.Case(
        loops=["bare", "torchtitan"], shape=TINY, seq_len=32, batch_size=1, dtype="float32",
        turns=1, warmup=0,
    )  # fmt: skip
    bare, peer = step.run(case)
    assert bare["tokens_per_second"] > 0
    assert peer == {"what": "torchtitan", "problem": "skipped: torchtitan not installed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_trains_the_same_model(name: str) -> None:
    if missing := [package for package in PACKAGES[name] if find_spec(package) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")
    case = step.Case(
        loops=["bare", name], shape=TINY, seq_len=32, batch_size=1, dtype="float32", turns=1,
        warmup=0,
    )  # fmt: skip
    _, peer = step.run(case)
    assert peer["problem"] is None
    assert peer["packages"].keys() == set(PACKAGES[name])


def test_turns_of_all_starts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Turn] = []
    monkeypatch.setattr(step, "measured", lambda case, first, turns: taken.extend(turns) or {})
    case = step.Case(
        loops=["bare"], shape=TINY, seq_len=32, batch_size=1, dtype="float32", restarts=2,
        turns=3, warmup=1,
    )  # fmt: skip
    assert [row["what"] for row in step.run(case)] == ["bare"]
    assert len({turn.seconds for turn in taken}) == 6


def test_another_model_is_seen() -> None:
    assert step.parity_problem([1.0, 2.0], [1.0, 2.00001]) is None
    assert "another model" in str(step.parity_problem([1.0, 2.0], [1.0, 2.1]))
    assert step.parity_problem([1.0], None) is None


def test_cpus_that_are_called_alike_are_told_apart(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    names = set()
    for family, model in ((25, 17), (26, 2)):
        one = f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: EPYC\n"
        cpuinfo.write_text(f"{one}\n{one}")
        names.add(cpu_name(cpuinfo))
    assert names == {"EPYC, family 25 model 17", "EPYC, family 26 model 2"}
    assert cpu_name(tmp_path / "not there")


def test_a_ratio_is_of_equal_turns() -> None:
    """A turn in which the machine was slow slows both, and changes nothing."""
    bare = [Turn(seconds, 2 * seconds, 0, 0, None) for seconds in (1.0, 9.0, 1.0)]
    ours = [Turn(2 * turn.seconds, turn.cpu_seconds, 0, 0, None) for turn in bare]
    assert step.compared(bare, ours) == {"ratio_wall": 0.5, "ratio_cpu": 1.0}


def failing(turns: Turns) -> None:
    turns.next_step()
    raise RuntimeError("out of | memory")


def test_a_loop_that_fails_is_told_and_one_that_hangs_is_ended() -> None:
    far = run.time.monotonic() + 60
    with pytest.raises(LoopError) as caught, Loop(failing, deadline=far) as loop:
        loop.turn()
    assert caught.value.problem == "RuntimeError: out of / memory"
    with pytest.raises(TimeoutError):
        Loop(run.time.sleep, deadline=run.time.monotonic() + 0.1)


def test_all_committed_configs_are_sound() -> None:
    for path in run.CONFIGS.glob("*.toml"):
        assert load_cases(path.stem, {})


GOOD = 'columns = ["what"]\n[[cases]]\nname = "a"\nbenchmark = "loss"\ntokens = 1\nvocab_size = 1\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("columns = [", "bad.toml: "),
        ("columns = []", "no cases"),
        (GOOD, "turns: Field required"),
        (GOOD + "turns = 1\nturnz = 1", "turnz: Extra inputs are not permitted"),
        (GOOD + 'turns = "many"', "turns: Input should be a valid integer"),
        (GOOD.replace('"loss"', '"lost"'), "'lost' is not one of ceilings, "),
        ("kolumns = 1\n" + GOOD, "kolumns"),
        (GOOD.replace("name", "nome"), "needs a name"),
    ],
)
def test_a_mistake_is_told_by_name(
    text: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "CONFIGS", tmp_path)
    (tmp_path / "bad.toml").write_text(text)
    assert main(["bad"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["steps"], "'steps' is not a benchmark: checkpoint, "),
        (["step", "--turns"], "--turns needs a value"),
        (["step", "turns=3"], "'turns' is not --key"),
        (["step", "--turnz=3"], "case 'float32': turnz: Extra inputs"),
    ],
)
def test_a_mistyped_command_is_told(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_overrides_are_tables() -> None:
    found = run.parse_overrides(["--turns", "5", "--keys.compile.enable=true", "--dtype", "bf16"])
    assert found == {"turns": 5, "keys": {"compile.enable": True}, "dtype": "bf16"}
    assert [case["tokens"] for case in load_cases("loss", {"tokens": 7})] == [7, 7]


def row(what: str, **values: Any) -> dict[str, Any]:
    facts = {"config": "c", "case": "a", "what": what, "problem": None} | environment("abc")
    return facts | values


def test_a_table_shows_the_newest_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    append_rows(out, [row("x", mfu_palm=0.5), row("y", ratio_wall=0.97349)])
    append_rows(out, [row("x", mfu_palm=0.25, problem="cold")])
    rows = read_rows(out)
    assert [r["what"] for r in newest(rows)] == ["y", "x"]
    *_, y, x = tables(rows, ["what", "mfu_palm", "ratio_wall"]).splitlines()
    assert (y, x) == ("| y |  | 0.973 |  |", "| x | 25.0% |  | cold |")


def test_a_torn_line_costs_no_other(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    append_rows(out, [row("x")])
    with out.open("a") as file:
        file.write('{"what": "to')
    append_rows(out, [row("y")])
    append_rows(out, [row("z")])
    assert [r["what"] for r in read_rows(out)] == ["x", "y", "z"]
    assert "\n\n" not in out.read_text()


def test_each_machine_has_a_table() -> None:
    rows = [row("x", cores=2), row("x", cores=4), row("y", cores=2)]
    here, *of_here, there, _, _, _, x = tables(rows, ["what"]).split("\n")
    assert "2 cores" in here
    assert of_here == ["", "| what |", "| --- |", "| x |", "| y |", ""]
    assert "4 cores" in there
    assert x == "| x |"


def test_tables_of_the_documentation_are_the_committed_rows() -> None:
    texts = [page.read_text() for page in table.PAGES]
    named = {name for text in texts for _, name, _ in table.MARKED.findall(text)}
    assert named >= {path.name for path in table.RESULTS.glob("*.jsonl")}
    assert [table.rendered(text) for text in texts] == texts, "python -m benchmarks.table"
    for path in table.RESULTS.glob("*.jsonl"):
        assert all(json.loads(line)["commit"] for line in path.read_text().splitlines())
