"""``show-batch`` reads the same rows as a run of several ranks, and names their documents."""

import json
from dataclasses import replace
from functools import reduce
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint.checkpoint_dir import STATE_FILE, write_metadata
from checkpoint.checkpointer import merge
from checkpoint.tensor_index import index_content, write_index
from config import load_config
from data.batch_size import batch_size_of
from data.loader import LoaderConfig, Microbatch, MicrobatchLoader
from data.tokenizer import load_tokenizer
from metrics.history import ROLLED_BACK
from run_spec import build_data
from runtime.labels import IGNORE_INDEX
from runtime.provenance import FOLDER, path_of, write_attempt, write_content
from tests.lib.attempts import attempt_of
from tools.show_batch import DataOfRun, main

SAVED, LAST = 5, 8
RAMP = [(2, 4), (2, 8)]
CONFIG = """\
[job]
name = "run"
[model]
vocab_size = 320
[training]
seq_len = 64
global_batch_size = 12
[[training.batch_size_ramp]]
steps = 2
global_batch_size = 4
[[training.batch_size_ramp]]
steps = 2
global_batch_size = 8
[data]
packing = "{packing}"
[[data.sources]]
type = "files"
path = "{folder}/web.jsonl"
name = "web"
weight = 3.0
[[data.sources]]
type = "files"
path = "{folder}/book.txt"
name = "books"
"""

Steps = dict[int, dict[int, Microbatch]]


@pytest.fixture(params=["concat", "best_fit"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Steps]:
    """A run folder with a checkpoint of step SAVED, and the rows of each step of two ranks."""
    web = [{"text": f"web page {i} " + "né " * (i % 40)} for i in range(300)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps(page) + "\n" for page in web))
    (tmp_path / "book.txt").write_text("".join(f"Line {i} of a book.\n" for i in range(9000)))
    folder = tmp_path / "run"
    folder.mkdir()
    text = CONFIG.format(packing=request.param, folder=tmp_path)
    (folder / "config.toml").write_text(text)
    config, tokenizer = load_config(folder / "config.toml", []), load_tokenizer("bytes")
    mixture, _ = build_data(config, tokenizer)
    loaders = [
        MicrobatchLoader(mixture, tokenizer, LoaderConfig(
            vocab_size=320, seq_len=64, microbatch_size=2, global_batch_size=12,
            dp_rank=rank, dp_degree=2, document_mask=True, prefetch=1, packing=request.param,
        ))
        for rank in range(2)
    ]  # fmt: skip
    steps: Steps = {}
    for step in range(1, LAST + 1):
        steps[step] = {}
        for loader in loaders:
            batches = list(islice(loader, batch_size_of(step, RAMP, 12) // 4))
            loader.commit(batches)
            for batch in batches:
                for i, span in enumerate(batch.spans):
                    steps[step][span.row] = Microbatch(batch.tokens[i], batch.labels[i])
        if step == SAVED:
            checkpoint = folder / "checkpoints" / f"step-{step:08d}"
            checkpoint.mkdir(parents=True)
            state = reduce(merge, [loader.state_dict() for loader in loaders])
            files = write_index(checkpoint, index_content([]))
            write_metadata(checkpoint, files, state={"data": state}, metadata={"step": step})
    for loader in loaders:
        loader.close()
    return folder, steps


def test_rows_are_those_of_the_run(run: tuple[Path, Steps]) -> None:
    folder, steps = run
    data = DataOfRun(folder / "config.toml")
    # Before the checkpoint, from the beginning; and after it.
    for step, rows in steps.items():
        found = data.read(step)
        assert sorted(found) == sorted(rows)
        for row, batch in found.items():
            assert torch.equal(batch.tokens[0], rows[row].tokens)
            assert torch.equal(batch.labels[0], rows[row].labels)
            shown = np.concatenate([part.ids for part in data.parts(batch)])
            assert np.array_equal(shown, rows[row].tokens[: len(shown)].numpy())
            # Padding is not shown.
            assert (rows[row].labels[len(shown) :] == IGNORE_INDEX).all()
            assert (rows[row].labels[: len(shown)] != IGNORE_INDEX).all()


@pytest.mark.parametrize("run", ["concat"], indirect=True)
def test_documents_are_named(run: tuple[Path, Steps], capsys: pytest.CaptureFixture[str]) -> None:
    folder, steps = run
    assert main([str(folder / "config.toml"), "7", "--chars", "30"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "step 7, read on from step 5"
    rows = [line for line in lines if line.startswith("row ")]
    assert len(rows) == len(steps[7])
    found = [line for line in lines if line.startswith("  web, ")]
    assert found
    for line in found:
        origin, text = line.split(" tokens: ")
        number = int(origin.split("web.jsonl, row ")[1].split(",")[0])
        page = f"web page {number} " + "né " * (number % 40)
        shown = text.removeprefix("<|begin_of_text|>").partition("<|")[0]
        assert shown.strip("\ufffd") in page
    assert main([str(folder / "config.toml"), "7", "--row", str(min(steps[7]))]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("row ")]
    assert shown == [line for line in rows if line.startswith(f"row {min(steps[7])}: ")]


@pytest.mark.parametrize("run", ["concat"], indirect=True)
def test_rollback_before_the_checkpoint_is_part_of_it(
    run: tuple[Path, Steps], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = run
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, ROLLED_BACK: 9}) + "\n")
    assert main([str(folder / "config.toml"), "6"]) == 0
    assert "after a rollback" not in capsys.readouterr().out


@pytest.mark.parametrize("run", ["concat"], indirect=True)
def test_batches_of_another_start_are_no_answer(
    run: tuple[Path, Steps], capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps 1 to 5 with sequences of 64, then 6 to 8 with 32, and again from 7 with 64."""
    folder, path = run[0], run[0] / "config.toml"
    for number, (seq_len, resumed) in enumerate([(64, None), (32, 5), (64, 6)], start=1):
        text = path.read_text().replace("seq_len = 64", f"seq_len = {seq_len}")
        config = write_content(folder / FOLDER, "config", "toml", text)
        found = attempt_of(folder / FOLDER)
        attempt = replace(found, number=number, config=config, resumed_from=resumed)
        write_attempt(folder / FOLDER, attempt)
    for step, code in ((3, 0), (5, 0), (6, 2), (7, 2)):
        assert main([str(path), str(step)]) == code
        output = capsys.readouterr()
        text = "training.seq_len: was 32 when step 6 was trained; give a copy of config.toml in"
        assert (text in output.err) == (code == 2), step
    path_of(folder / FOLDER, 2).write_text("{}")
    assert main([str(path), "7"]) == 0


@pytest.mark.parametrize("run", ["concat"], indirect=True)
def test_problems_are_named(run: tuple[Path, Steps], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = run
    line = {"step": 5, ROLLED_BACK: 7}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert main([str(folder / "config.toml"), "6"]) == 0
    text = "after a rollback from step 7 to 5, steps read later data: step 6 what is shown here for"
    assert f"{text} step 8\n" in capsys.readouterr().out
    assert main([str(folder / "config.toml"), "7", "--row", "99"]) == 2
    assert "--row 99: not one of step 7: " in capsys.readouterr().err
    (folder / "checkpoints" / f"step-{SAVED:08d}" / STATE_FILE).write_text("{}")
    assert main([str(folder / "config.toml"), "7"]) == 2
    assert "state.json: size or hash mismatch" in capsys.readouterr().err
    assert main([str(folder), "7"]) == 2
    assert f"{folder}: is a folder; give {folder}/config.toml" in capsys.readouterr().err
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("global_batch_size = 12", "", 1))
    assert main([str(config), "7"]) == 2
    assert "global_batch_size is missing; give config.toml of the" in capsys.readouterr().err
