"""Runs on mixtures: they end, resume, and read the same data on every mesh."""

import json
import math
from itertools import islice
from pathlib import Path

import pytest

from config.job_config import Data
from data.sources import build_sources
from runtime import exit_codes
from tests.lib.forked import codes, log, run, started
from tests.lib.launch import curve, records
from tests.lib.layouts import CP, PP, Layout
from tests.lib.marks import slow
from tools import check_ledger

KEYS = {
    "training.steps": "100",
    "training.global_batch_size": "4",
    "lr_scheduler.total_steps": "100",
    "validation.enable": "true",
    "data.validation_percent": "20.0",
    "data.on_bad_record": "skip",
    "metrics.enable_ledger": "true",
}
MESHES = [Layout(1), Layout(4), Layout(2, {CP: 2}), Layout(2, {PP: 2})]


def mixture(folder: Path) -> dict[str, str]:
    """Keys of a run on two sources that do not repeat; one has three bad records."""
    names = {"sun": 40, "moon": 24}
    for name, count in names.items():
        lines = [json.dumps({"text": f"{name} {i} " * (i % 7 + 1)}) for i in range(count)]
        bad = ["{", '{"text": 1}', "[]"] if name == "moon" else []
        (folder / f"{name}.jsonl").write_text("\n".join([*bad, *lines]) + "\n")
    sources = ", ".join(
        f'{{name = "{name}", path = "{folder}/{name}.jsonl", weight = {weight}, repeat = false}}'
        for name, weight in (("sun", 2.0), ("moon", 1.0))
    )
    return KEYS | {"data.sources": f"[{sources}]"}


def keys_of(layout: Layout, packing: str) -> dict[str, str]:
    parallelism = {f"parallelism.{key}": str(value) for key, value in layout.parallelism.items()}
    local = {"training.local_batch_size": "1" if layout.world_size == 4 else "2"}
    return parallelism | local | {"data.packing": packing, "data.document_mask": "true"}


@pytest.mark.parametrize("packing", ["concat", slow("best_fit")])
def test_mixture_gives_the_same_run_on_every_mesh(tmp_path: Path, packing: str) -> None:
    data = mixture(tmp_path)
    expected = tmp_path / "2"
    run(expected, 2, **data, **keys_of(Layout(2), packing))
    losses = curve(expected)
    assert 5 < len(losses) < 100
    assert "stopped by the end of the data" in log(expected)
    *_, last, validation = records(expected)
    assert set(validation) == {
        "step", "time", "restarts", "validation_bits_per_byte",
        "validation_bits_per_byte/sun", "validation_bits_per_byte/moon",
        "validation_loss", "validation_loss/sun", "validation_loss/moon",
    }  # fmt: skip
    sun, moon = (validation[f"validation_loss/{name}"] for name in ("sun", "moon"))
    assert min(sun, moon) < validation["validation_loss"] < max(sun, moon)
    # Each byte is a token, except bos and eos of each document.
    bits = validation["validation_loss"] / math.log(2.0)
    assert bits < validation["validation_bits_per_byte"] < 1.2 * bits
    assert last["data_share/sun"] + last["data_share/moon"] == pytest.approx(1.0)
    assert last["bad_records"] == 3
    # Its own validation sources change no step of a run.
    own, sizes = validation_sources(tmp_path)
    found = []
    for number, layout in enumerate(MESHES):
        folder = tmp_path / f"mesh-{number}"
        run(folder, layout.world_size, **data, **own, **keys_of(layout, packing))
        assert list(curve(folder)) == list(losses)
        for step, values in losses.items():
            assert curve(folder)[step] == pytest.approx(values, rel=1e-9), step
        runs = [str(path / "debug_model") for path in (folder, expected)]
        assert check_ledger.main([runs[0], "--against", runs[1]]) == 0
        if packing == "concat":
            assert f"target tokens = short {sizes['short']}, long {sizes['long']}\n" in log(folder)
        *_, last = records(folder)
        found.append({key: last[key] for key in last if key.startswith("validation")})
    assert len(found[0]) == 6
    if packing == "concat":
        mean = sum(found[0][f"validation_loss/{name}"] * size for name, size in sizes.items())
        assert found[0]["validation_loss"] == pytest.approx(mean / sum(sizes.values()), rel=1e-12)
    assert all(other == pytest.approx(found[0], rel=1e-9) for other in found)
    # The name stands for these documents.
    (tmp_path / "long.jsonl").write_text('{"text": "another"}\n')
    folder = tmp_path / "mesh-0"
    with started(folder, 1, **data, **own, **keys_of(MESHES[0], packing)) as processes:
        assert codes(processes) == {exit_codes.BAD_CONFIG}
    assert "validation.sources, long: its documents changed since the checkpoint" in log(folder)


def validation_sources(folder: Path) -> tuple[dict[str, str], dict[str, int]]:
    """Keys of a run that validates on two sources, and their target tokens in concat packing."""
    texts = {"short": [f"{i} " * 9 for i in range(11)], "long": ["a text of some length. " * 20]}
    for name, documents in texts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
        (folder / f"{name}.jsonl").write_text(lines)
    sources = ", ".join(f'{{name = "{n}", path = "{folder}/{n}.jsonl"}}' for n in texts)
    # Each byte and marker is a label, but the first of each of the 4 rows that has a document.
    sizes = {name: sum(len(t) + 2 for t in ts) - min(4, len(ts)) for name, ts in texts.items()}
    return {"validation.sources": f"[{sources}]", "validation.steps": "all"}, sizes


def test_mixture_resumes_on_other_ranks(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, 1, **data, **keys_of(Layout(1), "best_fit"))
    first = data | {"training.steps": "4"}
    run(parts, 2, **first, **keys_of(Layout(2), "best_fit"))
    run(parts, 1, **data, **keys_of(Layout(1), "best_fit"))
    assert "resumed from step" in log(parts)
    assert list(curve(parts)) == list(curve(whole))
    for step, values in curve(whole).items():
        assert curve(parts)[step] == pytest.approx(values, rel=1e-9), step
    assert (
        check_ledger.main([str(parts / "debug_model"), "--against", str(whole / "debug_model")])
        == 0
    )


def test_bad_held_out_record_raises_on_all_ranks(tmp_path: Path) -> None:
    """Only one rank reads the record."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(200):
        (texts / f"{number}.txt").write_text(f"text {number}\n" * 20)
    path = str(texts / "*.txt")
    config = Data(source="files", path=path, validation_percent=5.0)
    _, held_out = build_sources(config, 0)
    (source,) = held_out.values()
    # A file that the second row reads and the fingerprint does not sample.
    first = next(text for text in islice(source.documents(1, 4, 0), 10) if int(text.split()[1]) % 4)
    (texts / f"{first.split()[1]}.txt").write_bytes(b"caf\xe9" * 60)
    keys = {
        "data.source": "files", "data.path": path, "data.validation_percent": "5.0",
        "validation.enable": "true", "validation.steps": "10",
    }  # fmt: skip
    with started(tmp_path / "run", 2, **KEYS | keys | {"data.on_bad_record": "error"}) as processes:
        assert codes(processes) == {exit_codes.BAD_CONFIG}, log(tmp_path / "run")
    text = log(tmp_path / "run")
    assert "not UTF-8" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("is_validated", "message"),
    [
        ("false", "data: no document has text"),
        ("true", "validation: no document of rows has text; see data.validation_percent"),
    ],
)
def test_source_of_empty_documents_is_an_error(
    tmp_path: Path, is_validated: str, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n' * 20)
    source = f'[{{name = "rows", path = "{tmp_path}/rows.jsonl", repeat = false}}]'
    keys = KEYS | {"data.sources": source, "validation.enable": is_validated}
    with started(tmp_path / "run", 2, **keys) as processes:
        assert codes(processes) == {exit_codes.BAD_CONFIG}, log(tmp_path / "run")
    assert message in log(tmp_path / "run")
