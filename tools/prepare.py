"""Tokenize a run's documents once, into a folder that runs read with ``data.source = "tokens"``.

``python -m tools.prepare FOLDER [--config run.toml] [--data.path 'x/*.jsonl' ...] [--workers N]``
``python -m tools.prepare FOLDER --verify``: hash all files of a folder.

The documents and the tokenizer are those of [data], as a run would read them. Stopped, even by
SIGKILL, the same command goes on where it was; the bytes are the same for any number of workers.
"""

import argparse
import fcntl
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from config import load_config
from config.job_config import Data
from data.files import spread
from data.sources import open_documents
from data.token_files import (
    BEGUN_FILE,
    DTYPES,
    FORMAT,
    INDEX_FILE,
    check_sizes,
    dtype_of,
    index_text,
    read_index,
    verify,
)
from data.tokenizer import load_tokenizer
from runtime import exit_codes
from runtime.machine import usable_cpus
from tools.arguments import Parser, split_overrides, telling_mistakes, whole_number
from tools.token_shards import (
    Progress,
    WorkerLost,
    shard_name,
    tokenize,
    write_new_file,
)

CONFIG_FILE = Path(__file__).parents[1] / "train_configs" / "debug_model.toml"
SHARD_TOKENS = 1 << 26
# How many documents, spread over all, are measured to decide how many make a shard.
MEASURED = 64
SUFFIXES = ("bin", "ends", "json")
OURS = re.compile(r"(begun\.json|index\.json|shard-\d{5,}\.(bin|ends|json))(\.[0-9a-f]{32}\.tmp)?")


@telling_mistakes
def main(arguments: list[str]) -> int:
    try:
        options, overrides = parse(arguments)
        if options.verify:
            return verify_folder(options.folder)
        data = load_config(options.config or CONFIG_FILE, overrides).data
        n_workers = options.workers or usable_cpus()
        prepare(options.folder, data, n_workers=n_workers, shard_tokens=options.shard_tokens)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return exit_codes.PREEMPTED
    except WorkerLost as error:
        print(f"{error}; the same command goes on", file=sys.stderr)
        return exit_codes.FAILED
    return exit_codes.DONE


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The tool's own options, and the overrides of the run's keys."""
    own, overrides = split_overrides(arguments)
    for argument in overrides:
        key = argument.partition("=")[0]
        if key.startswith("--") and not key.startswith("--data."):
            raise ValueError(f"command line: {key} does nothing here; --data.KEY does")
    parser = Parser("python -m tools.prepare", description=__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, help="what is written, or gone on with")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="a run's; default train_configs/debug_model.toml",
    )
    add(
        "--workers",
        type=whole_number(1),
        metavar="N",
        help="processes; default: the CPUs there are",
    )
    add(
        "--shard_tokens",
        type=whole_number(1),
        metavar="N",
        help=f"of a shard, about; default {SHARD_TOKENS}",
    )
    add("--verify", action="store_true", help="only hash the files that are there")
    options = parser.parse_args(own)
    if options.verify and (overrides or len(own) > 2):
        raise ValueError("argument --verify: takes FOLDER and nothing else")
    options.shard_tokens = options.shard_tokens or SHARD_TOKENS
    return options, overrides


def verify_folder(folder: Path) -> int:
    n_files, n_wrong = 0, 0
    for path, problem in verify(folder):
        n_files += 1
        if problem:
            n_wrong += 1
            print(f"{path}: {problem}", file=sys.stderr)
    print(f"{folder}: {n_files - n_wrong} of {n_files} files are what was written")
    return exit_codes.BAD_CONFIG if n_wrong else exit_codes.DONE


def prepare(folder: Path, data: Data, *, n_workers: int, shard_tokens: int) -> None:
    """Fill ``folder`` with what is missing there; print how a run reads it.

    Raises ``ValueError`` for what cannot be read, and if the folder was begun with something else.
    """
    if len(data.mixture) != 1:
        raise ValueError("data.sources: each source of a mixture is prepared by itself")
    source = data.mixture[0]
    if source.type == "tokens":
        raise ValueError("data.source: tokens are what is written here")
    facts = _facts(data, shard_tokens)
    with _locked(folder):
        begun = _begin(folder, facts)
        n_shards = -(-begun["source"]["documents"] // begun["documents_per_shard"])
        if not (folder / INDEX_FILE).exists():
            shards = _finished_shards(folder, begun)
            missing = [number for number in range(n_shards) if number not in shards]
            progress = Progress(begun["source"]["documents"], list(shards.values()))
            tokenize(folder, source, begun, numbers=missing, n_workers=n_workers, progress=progress)
            _publish_index(folder, begun, n_shards, max_bad=data.max_bad_records)
        index = read_index(folder)
        for shard in index["shards"]:
            check_sizes(folder, shard, DTYPES[index["dtype"]])
        # The index now has what the other files of facts said.
        _remove(
            folder,
            {path.name for path in folder.iterdir() if path.suffix != ".json"} | {INDEX_FILE},
        )
    print(
        f"{folder}: {index['documents']:,} documents ({index['skipped']:,} empty and"
        f" {index['bad']:,} bad ones left out), {index['tokens']:,} tokens of {index['dtype']},"
        f" {n_shards} shards"
    )
    keys = {"source": "tokens", "path": str(folder), "tokenizer": index["tokenizer"]["name"]}
    told = " ".join(f"--data.{key} {shlex.quote(value)}" for key, value in keys.items())
    print(f"next: ./run_train.sh {told}")


def _facts(data: Data, shard_tokens: int) -> dict[str, Any]:
    """All that the bytes of the folder depend on."""
    source, skips_bad = data.mixture[0], data.on_bad_record == "skip"
    documents, fingerprint = open_documents(source, skips_bad=skips_bad)
    tokenizer = load_tokenizer(data.tokenizer)
    if len(documents) == 0:
        raise ValueError("data.path: there is no document")
    measured = spread(len(documents), MEASURED)
    texts = (documents[index] for index in measured)
    tokens = sum(len(tokenizer.encode_document(text)) for text in texts if isinstance(text, str))
    return {
        "format": FORMAT,
        "dtype": dtype_of(tokenizer.n_vocab),
        "tokenizer": {"name": data.tokenizer, "fingerprint": tokenizer.fingerprint},
        "source": {
            "name": f"{source.type} {source.path}".strip(),
            "fingerprint": fingerprint,
            "documents": len(documents),
        },
        "skips_bad": skips_bad,
        "shard_tokens": shard_tokens,
        "documents_per_shard": max(1, shard_tokens * len(measured) // max(1, tokens)),
    }


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if there is none; ``ValueError`` if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process is preparing it now") from None
        yield
    finally:
        os.close(descriptor)


def _begin(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that the folder was begun with; writes them if it is new."""
    foreign = sorted(path.name for path in folder.iterdir() if not OURS.fullmatch(path.name))
    if foreign:
        raise ValueError(f"{folder}: {foreign[0]} is not of a prepared folder; name a new one")
    if (folder / INDEX_FILE).exists():
        begun = read_index(folder)
    elif (folder / BEGUN_FILE).exists():
        begun = _read_json(folder / BEGUN_FILE)
        if begun.get("format") != FORMAT:
            raise ValueError(f"{folder / BEGUN_FILE}: its format is not {FORMAT}")
    else:
        write_new_file(folder / BEGUN_FILE, json.dumps(facts, indent=1).encode())
        return facts
    then, now = ([f["source"], f["tokenizer"], f["shard_tokens"]] for f in (begun, facts))
    changes = []
    for what, old, new in zip(("documents", "tokenizer"), then, now, strict=False):
        if old["fingerprint"] != new["fingerprint"]:
            is_same = old["name"] == new["name"]
            names = f"{old['name']} has changed" if is_same else f"{old['name']}, not {new['name']}"
            changes.append(f"{what}: {names}")
    if then[2] != now[2]:
        changes.append(f"--shard_tokens: {then[2]}, not {now[2]}")
    # Records left out so far stay so, which error does not allow; skip may begin at any time.
    if begun["skips_bad"] and not facts["skips_bad"]:
        changes.append("data.on_bad_record: skip, not error")
    if changes:
        raise ValueError(f"{folder} was begun with something else: {'; '.join(changes)}")
    # The same tokenizer may lie elsewhere now.
    return begun | {key: facts[key] for key in ("tokenizer", "skips_bad")}


def _finished_shards(folder: Path, begun: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The facts of the shards that are whole, by number; deletes all other files of shards."""
    finished = {}
    for path in folder.glob("shard-*.json"):
        # A shard's facts are written last, so the rest of it is there.
        with suppress(ValueError, KeyError):
            shard = _read_json(path)
            check_sizes(folder, shard, DTYPES[begun["dtype"]])
            finished[int(path.stem.removeprefix("shard-"))] = shard
    keep = {f"{shard_name(number)}.{suffix}" for number in finished for suffix in SUFFIXES}
    _remove(folder, keep | {BEGUN_FILE})
    return finished


def _remove(folder: Path, keep: set[str]) -> None:
    for path in folder.iterdir():
        if OURS.fullmatch(path.name) and path.name not in keep:
            path.unlink()


def _publish_index(folder: Path, begun: dict[str, Any], n_shards: int, *, max_bad: int) -> None:
    shards = [_read_json(folder / f"{shard_name(number)}.json") for number in range(n_shards)]
    counts = {
        k: sum(shard[k] for shard in shards) for k in ("documents", "tokens", "skipped", "bad")
    }
    if counts["bad"] > max_bad:
        raise ValueError(f"data.max_bad_records: {counts['bad']:,} records could not be read")
    if counts["documents"] == 0:
        raise ValueError(f"data.path: none of {counts['skipped']:,} documents has text")
    write_new_file(folder / INDEX_FILE, index_text({**begun, **counts, "shards": shards}))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


if __name__ == "__main__":
    # What schedulers send in place of Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
