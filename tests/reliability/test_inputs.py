"""Invalid inputs: token ids, documents and job names."""

import glob
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from config.job_config import Data, Parallelism
from config.paths import literal_path
from data.loader import LoaderConfig, Microbatch, MicrobatchLoader
from data.mixture import Mixture, RowStream
from data.sources import ShuffledDocuments, build_sources
from data.tokenizer import Tokenizer, load_tokenizer
from launcher import launch
from parallelisms.materialize import materialize
from parallelisms.parallel_dims import ParallelDims
from runtime import exit_codes
from tests.lib.launch import start
from tests.lib.layouts import CPU, TP, Layout, shard_debugmodel, small_args
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.planted import plant_modules
from tests.lib.ranks import RankPool

# Row 19: ids

ARGS = small_args("llama3", "debugmodel")
VOCAB = ARGS.vocab_size
LAYOUTS = [Layout(1), Layout(2, {TP: 2}), Layout(4, {TP: 2})]


def words(count: int) -> ShuffledDocuments:
    """One-word documents, the last of them bad."""
    texts = [*["good"] * (count - 1), "bad"]
    return ShuffledDocuments(texts, np.arange(count), seed=0, name="training", fingerprint="")


def tokenizer(bad_id: int) -> Tokenizer:
    ids = {"good": [5, 6, 7], "bad": [8, bad_id, 9]}
    return Tokenizer(lambda text: np.array(ids[text]), str, VOCAB, 1, 2, "words")


def run_first_epoch(layout: Layout, bad_id: int, is_checked: bool) -> list[str]:
    """Run the model on all documents; return the error of this rank, if any."""
    dims = ParallelDims.build(Parallelism(**layout.parallelism), layout.world_size, "cpu")
    model = shard_debugmodel("llama3", ARGS, layout).module
    materialize(model, CPU, seed=0)
    loader = MicrobatchLoader(
        Mixture([words(24)]),
        tokenizer(bad_id),
        LoaderConfig(
            vocab_size=VOCAB,
            seq_len=ARGS.max_seq_len,
            microbatch_size=2,
            global_batch_size=4,
            dp_rank=dims.batch_mesh.get_local_rank(),
            dp_degree=dims.batch_mesh.size(),
            document_mask=False,
            prefetch=1,
        ),
    )
    unchecked = patch.object(RowStream, "_check_ids", lambda *_: None)
    with nullcontext() if is_checked else unchecked, torch.no_grad():
        for _ in range(6 * loader.n_microbatches):
            batch, error = take(loader)
            if any(gather_errors(error)):
                return [error] if error else []
            try:
                model(*batch.inputs)
            except IndexError:
                return ["IndexError in the model"]
            if int(batch.tokens.max()) >= VOCAB:
                return ["no error"]
    return []


def take(loader: MicrobatchLoader) -> tuple[Microbatch, str]:
    try:
        return next(loader), ""
    except ValueError as error:
        return Microbatch(*[torch.empty(0)] * 2), str(error)


def gather_errors(error: str) -> list[str]:
    """Gather the errors of all ranks, because they must stop together. Collective."""
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return errors


@pytest.mark.row(19, "No id outside the vocabulary reaches the model")
@pytest.mark.parametrize("bad_id", [VOCAB, VOCAB + 100, -1])
def test_invalid_id_is_the_same_error_on_all_ranks(
    ranks: RankPool, bad_id: int, record_result: Callable[[str], None]
) -> None:
    errors = {
        text
        for layout in LAYOUTS
        for texts in ranks.run(run_first_epoch, layout.world_size, layout, bad_id, True)
        for text in texts
    }
    (document, row) = next(
        (number, row)
        for row in range(4)
        for number, text in enumerate(islice(words(24).documents(row, 4, 0), 6))
        if text == "bad"
    )
    assert errors == {
        f"data: 24 documents for training: document {document} of row {row} has the id {bad_id};"
        f" model.vocab_size is {VOCAB}"
    }
    record_result(f"id {bad_id}: one error text on {len(LAYOUTS)} layouts")


def test_unchecked_invalid_id_is_silent_with_tensor_parallel(
    ranks: RankPool,
) -> None:
    assert ranks.run(run_first_epoch, 1, LAYOUTS[0], VOCAB, False) == [["IndexError in the model"]]
    assert ranks.run(run_first_epoch, 2, LAYOUTS[1], VOCAB, False) == [["no error"]] * 2


def test_every_id_of_the_vocabulary_is_valid() -> None:
    loader = MicrobatchLoader(Mixture([words(24)]), tokenizer(VOCAB - 1), LoaderConfig(
vocab_size=VOCAB,
seq_len=8,
microbatch_size=4,
global_batch_size=4,
dp_rank=0,
dp_degree=1,
document_mask=False,
prefetch=1,
))  # fmt: skip
    labels = torch.cat([batch.labels for batch in islice(loader, 6)])
    assert int(labels.max()) == VOCAB - 1


# Row 18: documents


def lines(count: int) -> bytes:
    return b"".join(json.dumps({"text": f"text {i}"}).encode() + b"\n" for i in range(count))


def table(values: list[object]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": values}), sink)
    return sink.getvalue().to_pybytes()


@dataclass(frozen=True)
class Corruption:
    """File that is bad in one place, and the expected error besides its name."""

    file: str
    content: bytes | None
    """None: the file is deleted after the start of the run."""
    error: str


BROKEN = b'{"text": "no end\n'
PARQUET = table(["a", "b", "c"])
# pyarrow reads blocks of 10 MiB and restarts its line count in each.
N_FAR = 11_000
FAR = (json.dumps({"text": "a" * 1000}).encode() + b"\n") * N_FAR
CORRUPTIONS = {
    "broken JSON": Corruption("x.jsonl", lines(2) + BROKEN + lines(2), "line 3, byte 38: "),
    "broken JSON far down": Corruption(
        "x.jsonl", FAR + BROKEN, f"line {N_FAR + 1}, byte {len(FAR)}: "
    ),
    "cut off": Corruption("x.jsonl", lines(3)[:-4], "line 3, byte 38: "),
    "not an object": Corruption("x.jsonl", lines(2) + b"[1]\n", "line 3, byte 38: "),
    "zeros": Corruption("x.jsonl", lines(1) + bytes(100) + b"\n", "line 2, byte 19: "),
    "no text": Corruption("x.jsonl", lines(1) + b'{"a": 1}\n', "byte 19: data.text_key: no 'text'"),
    "null": Corruption(
        "x.jsonl", lines(1) + b'{"text": null}\n', "byte 19: data.text_key: 'text' is No"
    ),
    "number": Corruption(
        "x.jsonl", lines(1) + b'{"text": 1}\n', "byte 19: data.text_key: 'text' is 1"
    ),
    "not UTF-8 in JSON": Corruption(
        "x.jsonl", lines(1) + b'{"text": "caf\xe9"}\n', "line 2, byte 19: 'utf-8' codec"
    ),
    "lone surrogate": Corruption(
        "x.jsonl", lines(1) + b'{"text": "\\ud800"}\n', "line 2, byte 19: 'utf-8' codec"
    ),
    "cut off parquet": Corruption("x.parquet", PARQUET[: len(PARQUET) // 2], "Parquet magic bytes"),
    "null in parquet": Corruption("x.parquet", table(["a", None]), ", row 1, is null"),
    "not UTF-8": Corruption("x.txt", b"fine\n" * 9_000 + b"caf\xe9\n", "byte 45003: not UTF-8"),
    "vanished": Corruption("x.txt", None, "No such file"),
}
GOOD = {".jsonl": lines(5), ".parquet": PARQUET, ".txt": b"good text\n" * 100}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def error_of(folder: Path, file: str, content: bytes | None) -> str:
    """Read that file beside a good one; return the error, or "" without one."""
    path = folder / file
    good = GOOD[path.suffix]
    (folder / f"a{path.suffix}").write_bytes(good)
    path.write_bytes(good if content is None else content)
    try:
        config = Data(source="files", path=str(folder / "*"), validation_percent=0)
        sources, _ = build_sources(config, 0, with_held_out=False)
        if content is None:
            path.unlink()
        loader = MicrobatchLoader(Mixture(sources), load_tokenizer("bytes"), LoaderConfig(
vocab_size=320,
seq_len=1024,
microbatch_size=1,
global_batch_size=1,
dp_rank=0,
dp_degree=1,
document_mask=False,
prefetch=1,
))  # fmt: skip
        for _ in islice(loader, 60):
            pass
    except (ValueError, OSError) as error:
        return str(error)
    return ""


@pytest.mark.row(18, "Bad data is rejected with its place")
def test_bad_data_is_rejected_with_its_position(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    for name, bad in CORRUPTIONS.items():
        folder = tmp_path / name
        folder.mkdir()
        error = error_of(folder, bad.file, bad.content)
        assert str(folder / bad.file) in error, name
        assert bad.error in error, name
    record_result(f"{len(CORRUPTIONS)} of {len(CORRUPTIONS)} corruptions named by file and place")


@pytest.mark.parametrize("suffix", GOOD)
def test_good_data_is_accepted(tmp_path: Path, suffix: str) -> None:
    assert error_of(tmp_path, f"x{suffix}", GOOD[suffix]) == ""


# Row 26: names

HOSTILE = [
    "a;touch x",
    "$(touch x)",
    "`touch x`",
    "a|touch x",
    "a&touch x",
    "a\ntouch x",
    "a>x",
    "a<x",
    "../x",
    "/tmp/x",
    "a/../../x",
    "..",
    ".",
    ".x",
    "-rf",
    "--x",
    "a b",
    "*",
    "~",
    "a\0b",
    "a'b",
    'a"b',
    "${HOME}",
    "a\\b",
    "a\tb",
    "\u202ex",
    "a#b",
    "%s{0}",
    "a\n#SBATCH --wrap=x",
    "x" * 65,
]


@pytest.mark.row(26, "No shell, no pickle, no eval")
def test_hostile_job_names_are_rejected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record_result: Callable[[str], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: pytest.fail("the ranks were started"))
    Path("run.toml").write_text("")
    for name in HOSTILE:
        assert launch.main(["run.toml", f"--job.name={name}"], {"NGPU": "1"}) == (
            exit_codes.BAD_CONFIG
        )
        assert "job.name" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    record_result(f"{len(HOSTILE)} of {len(HOSTILE)} hostile names rejected")


@pytest.mark.row(26, "No shell, no pickle, no eval")
def test_hostile_paths_are_only_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may have any name; a run in it writes nowhere else, and imports nothing."""
    hostile = "a b;touch x;$(touch y)`touch z`\n'q\"*#$HOME&|>w"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for name in (hostile, "tmp"):
        (tmp_path / name).mkdir()
    plant_modules(tmp_path / "cwd")
    before = sorted((tmp_path / "cwd").rglob("*"))
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("PYTHONPATH", ":")
    text = tmp_path / hostile / "text.txt"
    text.write_text("some text\n" * 2000)
    process = start(
        tmp_path / hostile / "out",
        1,
        # A zygote has imported all that is planted.
        is_warm=False,
        **{
            "training.steps": "1",
            "data.source": "files",
            "data.path": literal_path(glob.escape(str(text))),
            "job.output_dir": literal_path(str(tmp_path / hostile / "out")),
            "validation.enable": "false",
        },
    )
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert (tmp_path / hostile / "out" / "debug_model" / "metrics.jsonl").exists()
    assert sorted((tmp_path / "cwd").rglob("*")) == before
    assert {path.name for path in tmp_path.iterdir()} == {hostile, "tmp", "cwd"}
    assert {path.name for path in (tmp_path / hostile).iterdir()} == {"text.txt", "out"}
