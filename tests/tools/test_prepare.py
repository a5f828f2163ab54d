"""Prepared folders against tokenizing directly; stopped and killed runs against whole ones."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from config.job_config import DataSource
from data.sources import open_documents
from data.token_files import open_token_files, read_index
from data.tokenizer import load_tokenizer
from runtime import exit_codes
from tests.test_train import ROOT
from tools import prepare

PATIENCE_SECONDS = 60
SHARD_TOKENS = "100000"


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


def run(*arguments: object, log: Path) -> tuple[int | None, str]:
    """Run the tool to its end; what it ends with, and what it says."""
    with started(*arguments, log=log) as process:
        process.join(PATIENCE_SECONDS)
        return process.exitcode, log.read_text()


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
    folder = tmp_path_factory.mktemp("whole")
    options = ["--shard_tokens", SHARD_TOKENS, "--workers", 1]
    code, said = run(folder / "p", *texts, *options, log=folder / "log")
    assert code == exit_codes.DONE, said
    return bytes_of(folder / "p")


def test_the_whole_is_as_planned(texts: list[object], whole: dict[str, bytes]) -> None:
    index = json.loads(whole["index.json"])
    names = [shard["file"] for shard in index["shards"]]
    assert len(names) > 5
    ends = [name.replace(".bin", ".ends") for name in names]
    assert whole.keys() == {"index.json", *names, *ends}
    tokens = [shard["tokens"] for shard in index["shards"]]
    assert 0.5 < np.mean(tokens[:-1]) / int(SHARD_TOKENS) < 2


@pytest.mark.parametrize("n_workers", [2, 3])
def test_any_number_of_workers_writes_the_same_bytes(
    tmp_path: Path, texts: list[object], whole: dict[str, bytes], n_workers: int
) -> None:
    options = ["--shard_tokens", SHARD_TOKENS, "--workers", n_workers]
    code, said = run(tmp_path / "p", *texts, *options, log=tmp_path / "log")
    assert code == exit_codes.DONE, said
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


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(
    tmp_path: Path, texts: list[object], whole: dict[str, bytes]
) -> None:
    rng = np.random.default_rng()
    folder, n_kills, seen = tmp_path / "p", 0, set()
    options = ["--shard_tokens", SHARD_TOKENS]
    for attempt in range(100):
        workers = ["--workers", 1 + attempt % 3]
        kept = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.bin")}
        kept = {p: time_ for p, time_ in kept.items() if p.with_suffix(".json").exists()}
        with started(folder, *texts, *options, *workers, log=tmp_path / "log") as process:
            process.join(float(rng.uniform(0.02, 0.6)))
            process.kill()
            process.join()
        # What was finished is not made again.
        assert all(path.stat().st_mtime_ns == time_ for path, time_ in kept.items())
        n_kills += process.exitcode == -signal.SIGKILL
        seen.add(len(kept))
        if process.exitcode == exit_codes.DONE:
            break
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert n_kills > 0
    assert bytes_of(folder) == whole, (n_kills, seen)


def test_a_worker_that_dies_costs_its_shard_alone(
    tmp_path: Path, texts: list[object], whole: dict[str, bytes]
) -> None:
    folder = tmp_path / "p"
    options = [*texts, "--shard_tokens", SHARD_TOKENS, "--workers", 2]
    with started(folder, *options, log=tmp_path / "log") as process:
        until(lambda: any(folder.glob("shard-*.json")))
        kill_one_that_writes(folder)
        process.join(PATIENCE_SECONDS)
    assert process.exitcode == exit_codes.FAILED
    assert "a worker died" in (tmp_path / "log").read_text()
    assert not list(folder.glob("*.tmp"))
    code, said = run(folder, *options, log=tmp_path / "log")
    assert code == exit_codes.DONE, said
    assert bytes_of(folder) == whole


def kill_one_that_writes(folder: Path) -> None:
    """SIGKILL to a process that has a temporary file of ``folder`` open."""

    def found() -> bool:
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                target = os.readlink(link)
                if target.startswith(f"{folder}/") and target.endswith(".tmp"):
                    os.kill(int(link.parts[2]), signal.SIGKILL)
                    return True
        return False

    until(found)


def until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_a_folder_of_something_else_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [str(part) for part in write_texts(tmp_path / "x", 5)]
    folder, options = str(tmp_path / "p"), [*texts, "--shard_tokens", "1000"]
    assert prepare.main([folder, *options, "--workers", "1"]) == exit_codes.DONE
    said = capsys.readouterr().out
    assert f"./run_train.sh --data.source tokens --data.path {folder}" in said
    before = bytes_of(Path(folder))

    def refusal(*arguments: str) -> str:
        assert prepare.main([folder, *arguments]) == exit_codes.BAD_CONFIG
        assert bytes_of(Path(folder)) == before
        return capsys.readouterr().err

    # Of a folder that is done, and of one that was only begun.
    for _ in range(2):
        said = refusal(*options, "--data.tokenizer", write_ranks(tmp_path / "r.tiktoken"))
        assert "tokenizer: bytes, not " in said
        assert "documents: " not in said
        assert "--shard_tokens: 1000, not 2000" in refusal(*texts, "--shard_tokens", "2000")
        assert "documents: files " in refusal("--shard_tokens", "1000")
        added = tmp_path / "x" / "new.txt"
        added.write_text("more")
        assert "*.txt has changed" in refusal(*options)
        added.unlink()
        index = json.loads((tmp_path / "p" / "index.json").read_text())
        (tmp_path / "p" / "index.json").unlink()
        (tmp_path / "p" / "begun.json").write_text(json.dumps(index))
        before = bytes_of(Path(folder))
        if _ == 0:
            continue
    (tmp_path / "p" / "mine").write_text("mine")
    before = bytes_of(Path(folder))
    assert "mine is not of a prepared folder" in refusal(*options)


def write_ranks(path: Path) -> str:
    import base64

    lines = [b"%s %d" % (base64.b64encode(bytes([value])), value) for value in range(256)]
    lines.append(base64.b64encode(b"the ") + b" 256")
    path.write_bytes(b"\n".join(lines))
    return str(path)


def test_a_bad_document_is_named_and_what_is_finished_stays(tmp_path: Path) -> None:
    options = [*write_texts(tmp_path / "x", 300), "--shard_tokens", 50000, "--workers", 1]
    code, said = run(tmp_path / "whole", *options, log=tmp_path / "log")
    assert code == exit_codes.DONE, said
    # One that is not among those that the source's fingerprint is made of.
    paths = sorted((tmp_path / "x").iterdir())
    bad = next(path for path in paths[251:] if path.stat().st_size > 1000)
    content = bad.read_bytes()
    bad.write_bytes(content[:300] + b"\xff" + content[301:])
    code, said = run(tmp_path / "p", *options, log=tmp_path / "log")
    assert code == exit_codes.BAD_CONFIG
    assert f"{bad}, byte 300: not UTF-8" in said
    assert "Traceback" not in said
    done = bytes_of(tmp_path / "p")
    assert "shard-00000.json" in done
    bad.write_bytes(content)
    code, said = run(tmp_path / "p", *options, log=tmp_path / "log")
    assert code == exit_codes.DONE, said
    assert bytes_of(tmp_path / "p") == bytes_of(tmp_path / "whole")


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
    facts = prepare._facts(source, "bytes", 10**6)
    prepare._work(connection, folder, source, facts)  # type: ignore[arg-type]


def test_two_at_once_are_refused(tmp_path: Path, texts: list[object]) -> None:
    with prepare._locked(tmp_path / "p"):
        code, said = run(tmp_path / "p", *texts, log=tmp_path / "log")
    assert code == exit_codes.BAD_CONFIG
    assert "another process is preparing it now" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: FOLDER"),
        (["p", "--data.source", "c4"], "data.source: c4 "),
        (["p", "--data.source", "files", "--data.path", "nowhere/*"], "data.path: no file"),
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


def test_ctrl_c_and_verify_from_the_command_line(tmp_path: Path) -> None:
    """A real terminal's worth of processes, reading a table."""
    text = "one two three\n" * 400
    rows = [json.dumps({"body": f"{number}\n{text}" * (number % 3)}) for number in range(3000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    source = DataSource(path=str(tmp_path / "*.jsonl"), text_key="body")
    ranks = write_ranks(tmp_path / "r.tiktoken")
    options = ["--data.source=files", "--data.path", source.path, "--data.text_key", "body"]
    command = [sys.executable, "-m", "tools.prepare", *options, str(tmp_path / "p")]
    command += ["--data.tokenizer", ranks, "--shard_tokens", "300000", "--workers", "2"]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        until(lambda: any((tmp_path / "p").glob("shard-*.json")))
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == exit_codes.PREEMPTED, said.decode()
    assert b"stopped; the same command goes on" in said
    assert b"Traceback" not in said
    assert not list((tmp_path / "p").glob("*.tmp"))
    assert not (tmp_path / "p" / "index.json").exists()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == exit_codes.DONE, done.stderr
    assert "3,000 of 3,000 documents" in done.stderr
    assert "Warning" not in done.stderr
    check_documents(tmp_path / "p", source, ranks)
    assert prepare.main([str(tmp_path / "p"), "--verify"]) == exit_codes.DONE
    with (tmp_path / "p" / "shard-00001.bin").open("r+b") as file:
        file.write(b"\xff")
    assert prepare.main([str(tmp_path / "p"), "--verify"]) == exit_codes.BAD_CONFIG
