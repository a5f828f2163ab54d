"""Prepared folders against tokenizing directly; stopped and killed runs against whole ones."""

import base64
import json
import os
import resource
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

from config.job_config import Data, DataSource
from data.sources import open_documents
from data.token_files import open_token_files, read_index
from data.tokenizer import load_tokenizer
from runtime import exit_codes
from tests.test_train import ROOT
from tools import prepare, token_shards

PATIENCE_SECONDS = 60
SHARD_TOKENS = 100_000
SHARDS = ["--shard_tokens", SHARD_TOKENS]


@contextmanager
def started(*arguments: object, log: Path) -> Iterator[BaseProcess]:
    """The tool in a process of its own, forked from one that has loaded torch."""
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
    """Run the tool to its end, here: its workers are forked from where torch is loaded."""
    return prepare.main([str(part) for part in arguments])


def write_texts(folder: Path, n_files: int) -> list[object]:
    """Files of words, some of them empty or of one character; the options that name them."""
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
    """What one worker writes that nothing stops."""
    folder = tmp_path_factory.mktemp("whole") / "p"
    assert run(folder, *texts, *SHARDS, "--workers", 1) == exit_codes.DONE
    return bytes_of(folder)


def test_the_whole_is_as_planned(texts: list[object], whole: dict[str, bytes]) -> None:
    index = json.loads(whole["index.json"])
    names = [shard["file"] for shard in index["shards"]]
    assert len(names) > 5
    ends = [name.replace(".bin", ".ends") for name in names]
    assert whole.keys() == {"index.json", *names, *ends}
    tokens = [shard["tokens"] for shard in index["shards"]]
    assert 0.5 < np.mean(tokens[:-1]) / SHARD_TOKENS < 2


@pytest.mark.parametrize("n_workers", [2, 3])
def test_any_number_of_workers_writes_the_same_bytes(
    tmp_path: Path, texts: list[object], whole: dict[str, bytes], n_workers: int
) -> None:
    assert run(tmp_path / "p", *texts, *SHARDS, "--workers", n_workers) == exit_codes.DONE
    assert bytes_of(tmp_path / "p") == whole


def check_documents(folder: Path, source: DataSource, tokenizer_name: str) -> None:
    """The documents of ``folder`` are those of ``source``, as a row of a batch encodes them."""
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


def test_documents_are_those_of_the_source(
    tmp_path: Path, texts: list[object], whole: dict[str, bytes]
) -> None:
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    check_documents(tmp_path, DataSource(path=str(texts[3])), "bytes")


def test_a_finished_folder_that_lost_something_is_named(
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


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(
    tmp_path: Path,
    texts: list[object],
    whole: dict[str, bytes],
    trials: Callable[[int], int],
    seen: Callable[[str], None],
) -> None:
    rng = np.random.default_rng()
    folder, kept, n_kills = tmp_path / "p", dict[Path, int](), 0
    for attempt in range(trials(40)):
        options = [*texts, *SHARDS, "--workers", 1 + attempt % 3]
        halves = {*folder.glob("shard-*.tmp")}
        with started(folder, *options, log=tmp_path / "log") as process:
            until(partial(writes_or_ended, process, folder, halves))
            # All of it takes about twice as long.
            time.sleep(float(rng.uniform(0, 0.1)))
            process.kill()
        assert process.exitcode in (-signal.SIGKILL, exit_codes.DONE)
        n_kills += process.exitcode == -signal.SIGKILL
        # What was finished is not made again.
        assert all(path.stat().st_mtime_ns == made for path, made in kept.items())
        finished = [path.with_suffix(".bin") for path in folder.glob("shard-*.json")]
        kept = {path: path.stat().st_mtime_ns for path in finished}
        if (folder / "index.json").exists():
            assert run(folder, *texts, *SHARDS) == exit_codes.DONE
            assert bytes_of(folder) == whole
            shutil.rmtree(folder)
            kept = {}
    # Workers of the last one may not yet know that nobody listens.
    assert run(folder, *texts, *SHARDS) == exit_codes.DONE
    assert n_kills > 0
    assert bytes_of(folder) == whole
    seen(f"{n_kills} kills, every file equal to that of a run that nothing stopped")


def writes_or_ended(process: BaseProcess, folder: Path, before: set[Path]) -> bool:
    return not process.is_alive() or not {*folder.glob("shard-*.tmp")} <= before


def test_a_worker_that_dies_costs_its_shard_alone(
    tmp_path: Path,
    texts: list[object],
    whole: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "p"
    killer = Thread(target=kill_one_that_writes, args=(folder,))
    killer.start()
    assert run(folder, *texts, *SHARDS, "--workers", 2) == exit_codes.FAILED
    killer.join()
    assert "a worker died" in capsys.readouterr().err
    assert not list(folder.glob("*.tmp"))
    assert run(folder, *texts, *SHARDS, "--workers", 2) == exit_codes.DONE
    assert bytes_of(folder) == whole


def kill_one_that_writes(folder: Path) -> None:
    """SIGKILL to a process that has a temporary file of a shard open."""

    def found() -> bool:
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                target = os.readlink(link)
                if target.startswith(f"{folder}/shard-") and target.endswith(".tmp"):
                    os.kill(int(link.parts[2]), signal.SIGKILL)
                    return True
        return False

    until(found)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_a_folder_of_something_else_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, folder = write_texts(tmp_path / "x", 5), tmp_path / "p"
    options = [*texts, "--shard_tokens", 1000]
    ranks = write_ranks(tmp_path / "r.tiktoken")
    assert run(folder, *options, "--workers", 1) == exit_codes.DONE
    assert f"./run_train.sh --data.source tokens --data.path {folder}" in capsys.readouterr().out

    def refusal(*arguments: object) -> str:
        before = bytes_of(folder)
        assert run(folder, *arguments) == exit_codes.BAD_CONFIG
        assert bytes_of(folder) == before
        return capsys.readouterr().err

    def check_refusals() -> None:
        said = refusal(*options, "--data.tokenizer", ranks)
        assert f"tokenizer: bytes, not {ranks}" in said
        assert "documents: " not in said
        assert "--shard_tokens: 1000, not 2000" in refusal(*texts, "--shard_tokens", 2000)
        said = refusal("--shard_tokens", 1000)
        assert f"documents: files {tmp_path}/x/*.txt, not builtin" in said
        added = tmp_path / "x" / "new.txt"
        added.write_text("more")
        assert "*.txt has changed" in refusal(*options)
        added.unlink()

    check_refusals()
    # The same of one that was only begun.
    (folder / "index.json").rename(folder / "begun.json")
    check_refusals()
    (folder / "mine").write_text("mine")
    assert "mine is not of a prepared folder" in refusal(*options)


def write_ranks(path: Path, merged: bytes = b"the ") -> str:
    lines = [b"%s %d" % (base64.b64encode(bytes([value])), value) for value in range(256)]
    lines.append(base64.b64encode(merged) + b" 256")
    path.write_bytes(b"\n".join(lines))
    return str(path)


def test_a_bad_document_is_named_and_what_is_finished_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*write_texts(tmp_path / "x", 300), "--shard_tokens", 50000, "--workers", 1]
    assert run(tmp_path / "whole", *options) == exit_codes.DONE
    # One that is not among those that the source's fingerprint is made of.
    bad = next(path for path in sorted((tmp_path / "x").iterdir())[251:] if size(path) > 1000)
    content = bad.read_bytes()
    bad.write_bytes(content[:300] + b"\xff" + content[301:])
    capsys.readouterr()
    assert run(tmp_path / "p", *options) == exit_codes.BAD_CONFIG
    assert f"{bad}, byte 300: not UTF-8" in capsys.readouterr().err
    first, *_, last = sorted((tmp_path / "p").glob("shard-*.json"))
    first = first.with_suffix(".bin")
    made = first.stat().st_mtime_ns
    # As a power cut may leave it.
    os.truncate(last.with_suffix(".ends"), 8)
    bad.write_bytes(content)
    assert run(tmp_path / "p", *options) == exit_codes.DONE
    assert first.stat().st_mtime_ns == made
    assert bytes_of(tmp_path / "p") == bytes_of(tmp_path / "whole")


def size(path: Path) -> int:
    return path.stat().st_size


def test_a_full_disk_is_named(tmp_path: Path, texts: list[object]) -> None:
    """The process may write no file longer than 4 KiB; the error is as that of a full disk."""
    context = get_context("forkserver")
    ours, theirs = context.Pipe()
    source = DataSource(path=str(texts[3]))
    process = context.Process(target=_work_on_a_full_disk, args=(theirs, tmp_path, source))
    process.start()
    theirs.close()
    ours.send(0)
    told = ours.recv()
    while not told.error:
        assert not told.is_done
        told = ours.recv()
    process.join(PATIENCE_SECONDS)
    assert told.error == f"{tmp_path}: File too large; what is finished stays"
    assert not list(tmp_path.glob("shard-*[!p]"))


def _work_on_a_full_disk(connection: object, folder: Path, source: DataSource) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    facts = prepare._facts(Data(source=source.type, path=source.path), 10**6)
    token_shards._work(connection, folder, source, facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["source", "tokenizer"])
def test_what_changes_before_a_worker_reads_it_is_named(
    tmp_path: Path, texts: list[object], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    facts = prepare._facts(Data(source="files", path=str(texts[3])), SHARD_TOKENS)
    facts[what]["fingerprint"] = "another"
    connection = Mock(**{"recv.side_effect": EOFError})
    monkeypatch.setattr(signal, "signal", Mock())
    token_shards._work(connection, tmp_path, DataSource(path=str(texts[3])), facts)
    ((told,), _) = connection.send.call_args
    assert told.error.endswith(" changed while it was read")
    assert not list(tmp_path.iterdir())


def test_a_shard_is_on_the_disk_before_its_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append("folder" if path == tmp_path else path.name[: -len(".tmp") - 33])

    monkeypatch.setattr(os, "fsync", note)
    begun = {"documents_per_shard": 1, "source": {"documents": 1}, "dtype": "uint16"}
    tokenizer = load_tokenizer("bytes")
    token_shards.write_shard(tmp_path, 0, cast(Any, ["text"]), tokenizer, begun, lambda told: None)
    shard = [f"shard-00000.{suffix}" for suffix in ("bin", "ends", "json")]
    assert synced == [*shard[:2], "folder", shard[2], "folder"]


def test_a_shard_of_many_blocks_counts_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_shards, "BLOCK_TOKENS", 4)
    texts = cast(Any, [None, "ab", None, "", "cde", "f", None])
    begun = {"documents_per_shard": 10, "source": {"documents": 7}, "dtype": "uint16"}
    told: list[token_shards.Told] = []
    token_shards.write_shard(tmp_path, 0, texts, load_tokenizer("bytes"), begun, told.append)
    facts = json.loads((tmp_path / "shard-00000.json").read_text())
    counts = {"documents": 3, "skipped": 1, "bad": 3, "tokens": 12, "min_id": 97, "max_id": 257}
    assert facts.items() >= counts.items()
    assert np.fromfile(tmp_path / "shard-00000.ends", "<i8").tolist() == [4, 9, 12]
    assert [(each.documents, each.tokens, each.is_done) for each in told] == [
        (2, 4, False),
        (5, 9, False),
        (7, 12, False),
        (7, 12, True),
    ]


def test_two_at_once_are_refused(
    tmp_path: Path, texts: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    with prepare._locked(tmp_path / "p"):
        assert run(tmp_path / "p", *texts) == exit_codes.BAD_CONFIG
    assert "another process is preparing it now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: FOLDER"),
        (["p", "--data.source", "tokens", "--data.path", "q"], "data.source: tokens "),
        (["p", "--data.source", "files", "--data.path", "nowhere/*"], "data.path: no file"),
        (["p", "--data.source", "files", "--data.path", "file"], "data.path: there is no document"),
        (["p", "--data.sources", "[{path = 'a'}, {path = 'b'}]"], "data.sources: each source of"),
        (["p", "--data.tokenizer", "none.json"], "data.tokenizer: none.json"),
        (["p", "--data.sourse", "files"], "data.sourse: unknown key; did you mean data.source?"),
        (["p", "--training.steps", "3"], "--training.steps does nothing here"),
        (["p", "--config", "none.toml"], "none.toml: "),
        (["p", "--workers", "0"], "argument --workers: '0' is not a whole number"),
        (["p", "--verify", "--data.source", "files"], "--verify: takes FOLDER and nothing else"),
        (["p", "--verify"], "p has no index.json"),
        (["file/p"], "file/p"),
    ],
)
def test_mistakes_are_named(
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
    ) as process:
        until(lambda: any(folder.glob("shard-*")))
        # As a terminal does it: to all of them.
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == exit_codes.PREEMPTED, said
    assert said == "stopped; the same command goes on\n"
    until(lambda: not is_group(process.pid))
    assert not list(folder.glob("*.tmp"))
    assert not (folder / "index.json").exists()
    assert run(folder, *texts, *SHARDS) == exit_codes.DONE
    assert bytes_of(folder) == whole


def test_a_dataset_of_the_hub(tmp_path: Path) -> None:
    """It is not streamed: what has no index cannot be shared out."""
    (tmp_path / "hub").mkdir()
    for part in range(3):
        rows = [json.dumps({"text": f"the word {i} of {part}"}) for i in range(part + 5)]
        (tmp_path / "hub" / f"train-{part}.jsonl").write_text("\n".join(rows) + "\n")
    keys = ["--data.source", "huggingface", "--data.path", str(tmp_path / "hub")]
    ranks, folder = write_ranks(tmp_path / "r.tiktoken"), tmp_path / "p"
    assert run(folder, *keys, "--data.tokenizer", ranks, "--workers", 2) == exit_codes.DONE
    assert read_index(folder)["documents"] == 18
    check_documents(folder, DataSource(type="huggingface", path=keys[3]), ranks)


def test_rows_of_a_table_from_the_command_line(tmp_path: Path) -> None:
    # Of some shards, all documents are empty.
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


def test_bad_records_are_left_out_and_counted(
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
    assert "16 documents (1 empty and 4 bad ones left out)" in capsys.readouterr().out
    files = open_token_files(str(tmp_path / "ids"))
    bytes_ = load_tokenizer("bytes")
    want = [f"number {i}" for i in range(20) if i % 5]
    assert [bytes_.decode(files[i][1:-1].tolist()) for i in range(len(files))] == want


def test_a_source_of_bad_records_alone_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("{\n" * 3)
    keys = ["--data.source", "files", "--data.path", tmp_path / "a.jsonl"]
    policy = ["--data.on_bad_record", "skip", "--workers", 1]
    assert run(tmp_path / "ids", *keys, *policy) == exit_codes.BAD_CONFIG
    assert "data.path: none of " in capsys.readouterr().err
    assert not (tmp_path / "ids" / "index.json").exists()


def test_a_folder_that_another_version_began_is_refused(
    tmp_path: Path, texts: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "begun.json").write_text('{"format": 2}')
    assert run(tmp_path, *texts) == exit_codes.BAD_CONFIG
    assert "begun.json: its format is not 1" in capsys.readouterr().err


def test_a_tokenizer_that_moved_is_taken_from_where_it_is_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what lies in its place by then is not."""
    folder = tmp_path / "p"
    texts = write_texts(tmp_path / "x", 300)
    old, moved = tmp_path / "own.tiktoken", tmp_path / "moved.tiktoken"
    write_ranks(old)
    paths = sorted((tmp_path / "x").iterdir())
    bad = next(path for path in paths[251:] if size(path) > 1000)
    bad.write_bytes(b"caf\xe9" * 100)
    begin = [folder, *texts, "--workers", 1, "--shard_tokens", 20000]
    assert run(*begin, "--data.tokenizer", old) == exit_codes.BAD_CONFIG
    assert list(folder.glob("shard-*.json")), "some shards are of the time before"
    old.rename(moved)
    write_ranks(old, b"def ")
    # What is not finished may be left out from here on.
    policy = ["--data.on_bad_record", "skip"]
    assert run(*begin, *policy, "--data.tokenizer", moved) == exit_codes.DONE
    assert run(*begin, "--data.tokenizer", moved) == exit_codes.BAD_CONFIG
    assert "data.on_bad_record: skip, not error" in capsys.readouterr().err
    files, tokenizer = open_token_files(str(folder)), load_tokenizer(str(moved))
    assert files.tokenizer_fingerprint == tokenizer.fingerprint
    source = DataSource(path=f"{tmp_path}/x/*.txt")
    documents, _ = open_documents(source, skips_bad=True)
    want = [text for index in range(len(documents)) if (text := documents[index])]
    assert [tokenizer.decode(files[i][1:-1].tolist()) for i in range(len(files))] == want
