"""Prepared folders against direct tokenization; interrupted runs against uninterrupted ones."""

import base64
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from config import load_config
from config.constraints import CONFIG_CONSTRAINTS
from config.job_config import Data, DataSource
from data import write_shards
from data.rank_files import LLAMA3_PATTERN, companion_of
from data.sources import build_sources, open_documents
from data.token_files import open_token_files, read_index
from data.tokenizer import load_tokenizer
from runtime import exit_codes
from tests.lib.patience import PATIENCE_SECONDS, wait_until
from tests.lib.repository import ROOT
from tools import prepare

SHARD_TOKENS = 100_000
SHARDS = ["--shard_tokens", SHARD_TOKENS]


@contextmanager
def started(*arguments: object, log: Path) -> Iterator[BaseProcess]:
    """Run the tool in another process, forked from one that has imported it."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_main, args=([str(part) for part in arguments], log))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _main(arguments: list[str], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.exit(prepare.main(arguments))


def run(*arguments: object) -> int:
    """Run the tool in this process; return its exit code."""
    return prepare.main([str(part) for part in arguments])


def write_texts(folder: Path, n_files: int) -> list[object]:
    """Write files of words, some empty or of one character; return the options to read them."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(n_files):
        length = int(rng.choice([0, 1, 300, 4000]))
        words = rng.choice(["the ", "caf\u00e9 ", "\u6f22\n", "def f(x): "], length)
        (folder / f"{number:04d}.txt").write_text("".join(words)[: length * 4])
    return ["--data.source", "files", "--data.path", f"{folder}/*.txt"]


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    return write_texts(tmp_path_factory.mktemp("texts") / "x", 400)


@pytest.fixture(scope="module")
def whole(texts: list[object], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of an uninterrupted run with one worker."""
    folder = tmp_path_factory.mktemp("whole") / "p"
    assert run(folder, *texts, *SHARDS, "--workers", 1) == exit_codes.DONE
    return bytes_of(folder)


def test_folder_has_shards_of_the_wanted_size(texts: list[object], whole: dict[str, bytes]) -> None:
    index = json.loads(whole["index.json"])
    names = [shard["file"] for shard in index["shards"]]
    assert len(names) > 5
    ends = [name.replace(".bin", ".ends") for name in names]
    assert whole.keys() == {".lock", "index.json", *names, *ends}
    tokens = [shard["tokens"] for shard in index["shards"]]
    assert 0.5 < np.mean(tokens[:-1]) / SHARD_TOKENS < 2


@pytest.mark.parametrize("n_workers", [2, 3])
def test_files_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, texts: list[object], whole: dict[str, bytes], n_workers: int
) -> None:
    assert run(tmp_path / "p", *texts, *SHARDS, "--workers", n_workers) == exit_codes.DONE
    assert bytes_of(tmp_path / "p") == whole


def check_documents(folder: Path, source: DataSource, tokenizer_name: str) -> None:
    """Assert that ``folder`` has the documents of ``source``, encoded as in a batch."""
    documents, _ = open_documents(source)
    tokenizer = load_tokenizer(tokenizer_name)
    texts = [documents[index] for index in range(len(documents))]
    files = open_token_files(str(folder))
    filled = [text for text in texts if len(text) > 0]
    assert len(files) == len(filled) > 0
    low, high = 2**63, 0
    for ids, text in zip((files[i] for i in range(len(files))), filled, strict=True):
        expected = [tokenizer.bos_id, *tokenizer.encode(str(text)).tolist(), tokenizer.eos_id]
        assert ids.tolist() == expected
        low, high = min(low, *expected), max(high, *expected)
    index = read_index(folder)
    assert index["skipped"] == len(texts) - len(filled)
    assert files.max_id == high
    assert min(shard["min_id"] for shard in index["shards"] if shard["documents"]) == low
    assert files.tokenizer_fingerprint == tokenizer.fingerprint


def test_documents_equal_those_of_the_source(
    tmp_path: Path, texts: list[object], whole: dict[str, bytes]
) -> None:
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    check_documents(tmp_path, DataSource(path=str(texts[3])), "bytes")


def test_truncated_file_of_a_finished_folder_is_named(
    tmp_path: Path,
    texts: list[object],
    whole: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    os.truncate(tmp_path / "shard-00001.bin", 5)
    assert run(tmp_path, *texts, *SHARDS) == exit_codes.BAD_CONFIG
    assert "shard-00001.bin has 5 bytes, not " in capsys.readouterr().err


def test_resume_after_sigkill_writes_the_same_files(
    tmp_path: Path,
    texts: list[object],
    whole: dict[str, bytes],
    trials: Callable[[int], int],
    record_result: Callable[[str], None],
) -> None:
    rng = np.random.default_rng()
    folder, finished_at, n_kills = tmp_path / "p", dict[Path, int](), 0
    for attempt in range(trials(40)):
        options = [*texts, *SHARDS, "--workers", 1 + attempt % 3]
        unfinished = {*folder.glob("shard-*.tmp")}
        with started(folder, *options, log=tmp_path / "log") as process:
            wait_until(partial(writes_or_ended, process, folder, unfinished), poll_seconds=0.01)
            # The whole run takes about 0.2 s.
            time.sleep(float(rng.uniform(0, 0.1)))
            process.kill()
        assert process.exitcode in (-signal.SIGKILL, exit_codes.DONE)
        n_kills += process.exitcode == -signal.SIGKILL
        # Finished shards are not written again.
        assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in finished_at.items())
        finished = [path.with_suffix(".bin") for path in folder.glob("shard-*.json")]
        finished_at = {path: path.stat().st_mtime_ns for path in finished}
        if (folder / "index.json").exists():
            assert run(folder, *texts, *SHARDS) == exit_codes.DONE
            assert bytes_of(folder) == whole
            shutil.rmtree(folder)
            finished_at = {}
    # Workers of the last attempt may still be running.
    assert run(folder, *texts, *SHARDS) == exit_codes.DONE
    assert n_kills > 0
    assert bytes_of(folder) == whole
    record_result(f"{n_kills} kills, every file equal to that of a run that nothing stopped")


def writes_or_ended(process: BaseProcess, folder: Path, before: set[Path]) -> bool:
    return not process.is_alive() or not {*folder.glob("shard-*.tmp")} <= before


def test_dead_worker_loses_only_its_shard(
    tmp_path: Path,
    texts: list[object],
    whole: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "p"
    killer = Thread(target=kill_a_writer, args=(folder,))
    killer.start()
    assert run(folder, *texts, *SHARDS, "--workers", 2) == exit_codes.FAILED
    killer.join()
    assert "a worker died" in capsys.readouterr().err
    assert not list(folder.glob("*.tmp"))
    assert run(folder, *texts, *SHARDS, "--workers", 2) == exit_codes.DONE
    assert bytes_of(folder) == whole


def kill_a_writer(folder: Path) -> None:
    """Send SIGKILL to a process that has a temporary file of a shard open."""

    def found() -> bool:
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                target = os.readlink(link)
                if target.startswith(f"{folder}/shard-") and target.endswith(".tmp"):
                    os.kill(int(link.parts[2]), signal.SIGKILL)
                    return True
        return False

    wait_until(found, poll_seconds=0.01)


def test_folder_of_other_settings_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, folder = write_texts(tmp_path / "x", 5), tmp_path / "p"
    options = [*texts, "--shard_tokens", 1000]
    ranks = write_ranks(tmp_path / "r.tiktoken")
    assert run(folder, *options, "--workers", 1) == exit_codes.DONE
    command = f"/shardloom train --job.name p --data.source tokens --data.path {folder}"
    assert command in capsys.readouterr().out

    def error_of(*arguments: object) -> str:
        before = bytes_of(folder)
        assert run(folder, *arguments) == exit_codes.BAD_CONFIG
        assert bytes_of(folder) == before
        return capsys.readouterr().err

    def check_errors() -> None:
        error = error_of(*options, "--data.tokenizer", ranks)
        assert f"tokenizer: bytes, not {ranks}" in error
        assert "documents: " not in error
        assert "--shard_tokens: 1000, not 2000" in error_of(*texts, "--shard_tokens", 2000)
        error = error_of("--shard_tokens", 1000)
        assert f"documents: files {tmp_path}/x/*.txt, not builtin" in error
        added = tmp_path / "x" / "new.txt"
        added.write_text("more")
        assert "*.txt has changed" in error_of(*options)
        added.unlink()

    check_errors()
    # An unfinished folder gives the same errors.
    (folder / "index.json").rename(folder / "begun.json")
    check_errors()
    (folder / "begun.json").rename(tmp_path / "plan")
    assert ".bin is not a file of shardloom prepare" in error_of(*options)
    (tmp_path / "plan").rename(folder / "begun.json")
    (folder / "mine").write_text("mine")
    assert "mine is not a file of shardloom prepare" in error_of(*options)


def write_ranks(path: Path, merged: bytes = b"the ") -> str:
    lines = [b"%s %d" % (base64.b64encode(bytes([value])), value) for value in range(256)]
    lines.append(base64.b64encode(merged) + b" 256")
    path.write_bytes(b"\n".join(lines))
    special = {"<|begin_of_text|>": 257, "<|end_of_text|>": 258}
    companion = {"pattern": LLAMA3_PATTERN, "special_tokens": special}
    path.with_name(f"{path.name}.json").write_text(json.dumps(companion))
    return str(path)


def test_bad_document_is_named_and_finished_shards_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*write_texts(tmp_path / "x", 300), "--shard_tokens", 50000, "--workers", 1]
    assert run(tmp_path / "whole", *options) == exit_codes.DONE
    # A file that the source's fingerprint does not sample.
    bad = next(path for path in sorted((tmp_path / "x").iterdir())[251:] if size(path) > 1000)
    content = bad.read_bytes()
    bad.write_bytes(content[:300] + b"\xff" + content[301:])
    capsys.readouterr()
    assert run(tmp_path / "p", *options) == exit_codes.BAD_CONFIG
    assert f"{bad}, byte 300: not UTF-8" in capsys.readouterr().err
    first, *_, last = sorted((tmp_path / "p").glob("shard-*.json"))
    first = first.with_suffix(".bin")
    time_ns = first.stat().st_mtime_ns
    # A power cut may leave such a file.
    os.truncate(last.with_suffix(".ends"), 8)
    bad.write_bytes(content)
    assert run(tmp_path / "p", *options) == exit_codes.DONE
    assert first.stat().st_mtime_ns == time_ns
    assert bytes_of(tmp_path / "p") == bytes_of(tmp_path / "whole")


def size(path: Path) -> int:
    return path.stat().st_size


def test_full_disk_is_named(tmp_path: Path, texts: list[object]) -> None:
    """The worker's files are limited to 4 KiB, which raises an error like a full disk."""
    context = get_context("forkserver")
    connection, worker_end = context.Pipe()
    source = DataSource(path=str(texts[3]))
    process = context.Process(target=_work_on_a_full_disk, args=(worker_end, tmp_path, source))
    process.start()
    worker_end.close()
    connection.send(0)
    report = connection.recv()
    while not report.error:
        assert not report.is_done
        report = connection.recv()
    process.join(PATIENCE_SECONDS)
    assert report.error == f"{tmp_path}: File too large; finished shards are kept"
    assert not list(tmp_path.glob("shard-*[!p]"))


def _work_on_a_full_disk(connection: object, folder: Path, source: DataSource) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    open_source, data = partial(open_documents, source), Data(source=source.type, path=source.path)
    plan = prepare._build_plan(data, open_source, 10**6)
    write_shards._work(connection, folder, open_source, plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["source", "tokenizer"])
def test_change_before_a_worker_starts_is_named(
    tmp_path: Path, texts: list[object], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    data = Data(source="files", path=str(texts[3]))
    open_source = partial(open_documents, data.mixture[0])
    plan = prepare._build_plan(data, open_source, SHARD_TOKENS)
    plan[what]["fingerprint"] = "another"
    connection = Mock(**{"recv.side_effect": EOFError})
    monkeypatch.setattr(signal, "signal", Mock())
    write_shards._work(connection, tmp_path, open_source, plan)
    ((report,), _) = connection.send.call_args
    assert report.error.endswith(" changed while it was read")
    assert not list(tmp_path.iterdir())


def test_shard_is_synced_before_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def record(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append("folder" if path == tmp_path else path.name[: -len(".tmp") - 33])

    monkeypatch.setattr(os, "fsync", record)
    plan = {"documents_per_shard": 1, "source": {"documents": 1}, "dtype": "uint16"}
    plan |= {"skips_bad": False}
    tokenizer = load_tokenizer("bytes")
    write_shards.write_shard(tmp_path, 0, cast(Any, ["text"]), tokenizer, plan, lambda report: None)
    shard = [f"shard-00000.{suffix}" for suffix in ("bin", "ends", "json")]
    assert synced == [*shard[:2], "folder", shard[2], "folder"]


def test_counts_of_a_shard_include_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_shards, "BLOCK_TOKENS", 4)
    texts = cast(Any, [None, "ab", None, "", "cde", "f", None])
    plan = {"documents_per_shard": 10, "source": {"documents": 7}, "dtype": "uint16"}
    plan |= {"skips_bad": False}
    reports: list[write_shards.WorkerReport] = []
    write_shards.write_shard(tmp_path, 0, texts, load_tokenizer("bytes"), plan, reports.append)
    metadata = json.loads((tmp_path / "shard-00000.json").read_text())
    counts = {"documents": 3, "skipped": 1, "bad": 3, "tokens": 12, "min_id": 97, "max_id": 257}
    assert metadata.items() >= counts.items()
    assert np.fromfile(tmp_path / "shard-00000.ends", "<i8").tolist() == [4, 9, 12]
    assert [(each.documents, each.tokens, each.is_done) for each in reports] == [
        (2, 4, False),
        (5, 9, False),
        (7, 12, False),
        (7, 12, True),
    ]


def test_locked_folder_is_rejected(
    tmp_path: Path, texts: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    with prepare._locked(tmp_path / "p"):
        assert run(tmp_path / "p", *texts) == exit_codes.BAD_CONFIG
    assert "locked by another shardloom prepare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: FOLDER"),
        (["p", "--data.source", "tokens", "--data.path", "q"], "data.source: tokens "),
        (["p", "--data.source", "files", "--data.path", "nowhere/*"], "data.path: no file"),
        (["p", "--data.source", "files", "--data.path", "file"], "data.path: no documents"),
        (
            ["p", "--data.sources", "[{path = 'a'}, {path = 'b'}]"],
            "data.sources: prepare each",
        ),
        (["p", "--data.tokenizer", "none.json"], "data.tokenizer: none.json"),
        (["p", "--data.sourse", "files"], "data.sourse: unknown key; did you mean data.source?"),
        (["p", "--training.steps", "3"], "--training.steps has no effect here"),
        (["p", "--config", "none.toml"], "none.toml: "),
        (["p", "--workers", "0"], "argument --workers: '0' is not a whole number"),
        (["p", "--verify", "--data.source", "files"], "--verify: takes only FOLDER"),
        (["p", "--verify"], "p has no index.json"),
        (["file/p"], "file/p"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert prepare.main(arguments) == exit_codes.BAD_CONFIG
    assert message in capsys.readouterr().err


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tools.prepare", *(str(part) for part in arguments)]


def is_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_ctrl_c_ends_all_processes(
    tmp_path: Path, texts: list[object], whole: dict[str, bytes]
) -> None:
    folder = tmp_path / "p"
    with subprocess.Popen(
        command(folder, *texts, *SHARDS, "--workers", 2),
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell ignores it in its background jobs, and a process inherits that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        wait_until(lambda: any(folder.glob("shard-*")), poll_seconds=0.01)
        # A terminal sends SIGINT to the whole process group.
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == exit_codes.PREEMPTED, error
    assert error == "interrupted; run the same command to resume\n"
    wait_until(lambda: not is_group(process.pid))
    assert not list(folder.glob("*.tmp"))
    assert not (folder / "index.json").exists()
    assert run(folder, *texts, *SHARDS) == exit_codes.DONE
    assert bytes_of(folder) == whole


def test_hub_dataset_is_prepared(tmp_path: Path) -> None:
    """It is downloaded, because workers cannot share a stream without an index."""
    (tmp_path / "hub").mkdir()
    for part in range(3):
        rows = [json.dumps({"text": f"the word {i} of {part}"}) for i in range(part + 5)]
        (tmp_path / "hub" / f"train-{part}.jsonl").write_text("\n".join(rows) + "\n")
    keys = ["--data.source", "huggingface", "--data.path", str(tmp_path / "hub")]
    ranks, folder = write_ranks(tmp_path / "r.tiktoken"), tmp_path / "p"
    assert run(folder, *keys, "--data.tokenizer", ranks, "--workers", 2) == exit_codes.DONE
    assert read_index(folder)["documents"] == 18
    check_documents(folder, DataSource(type="huggingface", path=keys[3]), ranks)


@pytest.mark.parametrize(
    "tables",
    [
        '[data]\nsource = "files"\npath = "TEXTS"\ntext_key = "body"\n',
        '[[data.sources]]\npath = "TEXTS"\ntext_key = "body"\n',
        '[[data.sources]]\npath = "TEXTS"\ntext_key = "body"\nname = "a"\nrepeat = false\n',
        '[data]\nsource = "huggingface"\npath = "FOLDER"\nrevision = "main"\ntext_key = "body"\n',
    ],
)
def test_next_command_trains_the_configuration_on_the_tokens(
    tables: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts := tmp_path / "texts").mkdir()
    (texts / "a.jsonl").write_text('{"body": "some text"}\n')
    file, folder = tmp_path / "a run.toml", tmp_path / "p"
    tables = tables.replace("TEXTS", f"{texts}/*.jsonl").replace("FOLDER", str(texts))
    file.write_text(f"{tables}[training]\nsteps = 7\n")
    assert run(folder, "--config", file, "--workers", 1) == exit_codes.DONE
    line = capsys.readouterr().out.splitlines()[-1]
    _, _, command, named, *overrides = shlex.split(line)
    assert (command, named) == ("train", str(file))
    config = load_config(Path(named), overrides)
    (text,), (source,) = load_config(file, []).data.mixture, config.data.mixture
    assert (source.name, source.repeat) == (text.name, text.repeat)
    assert (source.type, source.path, config.training.steps) == ("tokens", str(folder), 7)
    assert [row.message(config) for row in CONFIG_CONSTRAINTS if row.violated(config)] == []


def test_table_is_prepared_from_the_command_line(tmp_path: Path) -> None:
    # Some shards have only empty documents.
    counts = [0 if 1000 <= number < 2000 else number % 3 for number in range(3000)]
    texts = [f"{number} the word\n" * count for number, count in enumerate(counts)]
    rows = "\n".join(json.dumps({"body": text}) for text in texts)
    (tmp_path / "rows.jsonl").write_text(rows)
    source = DataSource(path=str(tmp_path / "*.jsonl"), text_key="body")
    ranks, folder = write_ranks(tmp_path / "r.tiktoken"), tmp_path / "p"
    keys = ["--data.source=files", "--data.path", source.path, "--data.text_key", "body"]
    done = subprocess.run(
        command(*keys, folder, "--data.tokenizer", ranks, "--shard_tokens", 3000),
        env={**ENVIRONMENT, "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == exit_codes.DONE, done.stderr
    assert "3,000 of 3,000 documents" in done.stderr
    assert "Warning" not in done.stderr
    check_documents(folder, source, ranks)
    assert 0 in [shard["documents"] for shard in read_index(folder)["shards"]]
    assert run(folder, "--verify") == exit_codes.DONE
    with (folder / "shard-00001.bin").open("r+b") as file:
        file.write(b"\xff")
    assert run(folder, "--verify") == exit_codes.BAD_CONFIG


def test_bad_records_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": f"number {i}"}) if i % 5 else "{" for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": ""}']) + "\n")
    arguments = [str(tmp_path / "ids"), "--data.source", "files", "--data.path"]
    arguments += [str(tmp_path / "a.jsonl"), "--workers", "2", "--shard_tokens", "40"]
    assert prepare.main(arguments) == exit_codes.BAD_CONFIG
    assert "line 1, byte 0" in capsys.readouterr().err
    arguments += ["--data.on_bad_record", "skip"]
    assert prepare.main([*arguments, "--data.max_bad_records", "3"]) == exit_codes.BAD_CONFIG
    assert "data.max_bad_records: 4 records could not be read" in capsys.readouterr().err
    assert prepare.main([*arguments, "--data.max_bad_records", "4"]) == exit_codes.DONE
    assert "16 documents (1 empty and 4 bad ones skipped)" in capsys.readouterr().out
    files = open_token_files(str(tmp_path / "ids"))
    bytes_ = load_tokenizer("bytes")
    want = [f"number {i}" for i in range(20) if i % 5]
    assert [bytes_.decode(files[i][1:-1].tolist()) for i in range(len(files))] == want


def test_source_of_only_bad_records_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("{\n" * 3)
    keys = ["--data.source", "files", "--data.path", tmp_path / "a.jsonl"]
    policy = ["--data.on_bad_record", "skip", "--workers", 1]
    assert run(tmp_path / "ids", *keys, *policy) == exit_codes.BAD_CONFIG
    assert "data.path: none of " in capsys.readouterr().err
    assert not (tmp_path / "ids" / "index.json").exists()


def test_folder_of_another_format_is_rejected(
    tmp_path: Path, texts: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "begun.json").write_text('{"format": 2}')
    assert run(tmp_path, *texts) == exit_codes.BAD_CONFIG
    assert "begun.json: format is not 1" in capsys.readouterr().err


def interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_moved_tokenizer_is_read_from_its_new_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A different tokenizer at the old path is not used."""
    folder = tmp_path / "p"
    texts = write_texts(tmp_path / "x", 300)
    old, moved = tmp_path / "own.tiktoken", tmp_path / "moved.tiktoken"
    write_ranks(old)
    paths = sorted((tmp_path / "x").iterdir())
    bad = next(path for path in paths[251:] if size(path) > 1000)
    bad.write_bytes(b"caf\xe9" * 100)
    begin = [folder, *texts, "--workers", 1, "--shard_tokens", 20000]
    assert run(*begin, "--data.tokenizer", old) == exit_codes.BAD_CONFIG
    assert list(folder.glob("shard-*.json")), "no shard was finished before"
    old.rename(moved)
    companion_of(old).rename(companion_of(moved))
    write_ranks(old, b"def ")
    # Documents of unfinished shards may be skipped from here on, also after an interruption.
    policy = ["--data.on_bad_record", "skip"]
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "tokenize", interrupt)
        assert run(*begin, *policy, "--data.tokenizer", moved) == exit_codes.PREEMPTED
    assert run(*begin, "--data.tokenizer", moved) == exit_codes.BAD_CONFIG
    assert "data.on_bad_record: skip, not error" in capsys.readouterr().err
    assert run(*begin, *policy, "--data.tokenizer", moved) == exit_codes.DONE
    assert run(*begin, "--data.tokenizer", moved) == exit_codes.BAD_CONFIG
    assert "data.on_bad_record: skip, not error" in capsys.readouterr().err
    files, tokenizer = open_token_files(str(folder)), load_tokenizer(str(moved))
    assert files.tokenizer_fingerprint == tokenizer.fingerprint
    source = DataSource(path=f"{tmp_path}/x/*.txt")
    documents, _ = open_documents(source, skips_bad=True)
    want = [text for index in range(len(documents)) if (text := documents[index])]
    assert [tokenizer.decode(files[i][1:-1].tolist()) for i in range(len(files))] == want


def test_markers_are_prepared_and_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, texts = tmp_path / "p", write_texts(tmp_path / "x", 5)
    begin = [folder, *texts, "--workers", 1]
    assert run(*begin, "--data.bos=") == exit_codes.DONE
    assert "--data.tokenizer bytes --data.bos ''\n" in capsys.readouterr().out
    files = open_token_files(str(folder))
    documents, _ = open_documents(DataSource(path=f"{tmp_path}/x/*.txt"))
    found = (documents[i] for i in range(len(documents)))
    want = [[*str(text).encode(), 257] for text in found if text]
    assert [files[i].tolist() for i in range(len(files))] == want
    assert run(*begin) == exit_codes.BAD_CONFIG
    assert "tokenizer: bytes with data.bos '', not bytes" in capsys.readouterr().err
    data = Data(source="tokens", path=str(folder))
    build_sources(data, 0, tokenizer=load_tokenizer("bytes", bos=""))
    with pytest.raises(ValueError, match=r"another tokenizer .*: set data\.bos = '' and data\.eos"):
        build_sources(data, 0, tokenizer=load_tokenizer("bytes"))


@pytest.mark.parametrize("n_workers", [1, 2])
def test_files_of_validation_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], n_workers: int
) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"text {number}\n")
    os.link(tmp_path / "4.txt", tmp_path / "held_out")
    keys = f'[data]\nsource = "files"\npath = "{tmp_path}/*.txt"\n'
    keys += f'[[validation.sources]]\nname = "own"\npath = "{tmp_path}/held_out"\n'
    # No tokens of validation need exist yet.
    keys += '[[validation.sources]]\nname = "ids"\ntype = "tokens"\npath = "nowhere"\n'
    config = tmp_path / "run.toml"
    config.write_text(keys)
    begin = [tmp_path / "p", "--config", config, "--workers", n_workers, "--shard_tokens", 20]
    assert run(*begin) == exit_codes.BAD_CONFIG
    error = f"{tmp_path}/4.txt is also a file of validation.sources, own; see its key exclude_from"
    assert error in capsys.readouterr().err
    config.write_text(keys.replace("held_out", 'held_out"\nexclude_from_training = true\n#"'))
    assert run(*begin) == exit_codes.DONE
    files, tokenizer = open_token_files(str(tmp_path / "p")), load_tokenizer("bytes")
    found = [tokenizer.decode(files[i][1:-1].tolist()) for i in range(len(files))]
    assert found == [f"text {number}\n" for number in range(9) if number != 4]


def test_only_unfinished_shards_are_deleted(tmp_path: Path) -> None:
    kept = {"notes.tmp", "shard-00000.bin", "shard-00000.bin.tmp", "shard-00001.bin.mine.tmp"}
    own = [
        f"shard-{number:05d}.{kind}.{'0a' * 16}.tmp"
        for number in (0, 123456)
        for kind in ("bin", "ends", "json")
    ]
    for name in (*kept, *own):
        (tmp_path / name).touch()
    with write_shards._workers(0, tmp_path, Mock(), {}):
        pass
    assert {path.name for path in tmp_path.iterdir()} == kept
