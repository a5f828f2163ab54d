"""Tokenize a run's documents into a folder that runs read with ``data.source = "tokens"``.

``shardloom prepare FOLDER [--config run.toml] [--data.path 'x/*.jsonl' ...] [--workers N]``
``shardloom prepare FOLDER --verify``: hash all files of a folder.

[data] configures documents and tokenizer as in a run. After an interruption, even by SIGKILL, the
same command resumes. The files are identical for any number of workers.
"""

import argparse
import fcntl
import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from config import load_config
from config.job_config import Data, DataSource
from config.loader import find_config, read_toml
from config.paths import literal_path
from data.files import TOKEN_INDEX_FILE, evenly_spaced
from data.sources import Reserved, open_documents
from data.token_files import (
    BEGUN_FILE,
    DTYPES,
    FORMAT,
    check_sizes,
    encode_index,
    read_index,
    smallest_dtype,
    verify,
)
from data.tokenizer import load_tokenizer
from data.validation_sources import reserved_files
from data.write_shards import (
    OpenSource,
    Progress,
    WorkerDied,
    atomic_write_bytes,
    shard_name,
    tokenize,
)
from runtime import exit_codes
from runtime.commands import command_text
from runtime.filesystem import read_input
from runtime.hub_paths import pin_names
from runtime.log import say
from runtime.machine import available_cpus
from runtime.run_lock import lock_error_text
from runtime.signals import handle_signals
from tools.cli import (
    Parser,
    path_argument,
    reporting_errors,
    run_name,
    split_overrides,
    toml_text,
    whole_number,
)

CONFIG_FILE = Path(__file__).parents[1] / "train_configs" / "debug_model.toml"
SHARD_TOKENS = 1 << 26
# Number of evenly spaced documents that estimate how many documents make a shard.
MEASURED_DOCUMENTS = 64
# Keys that describe the text of a source, with the values that have no effect.
DEFAULTS_OF_TEXT = {
    "source": "builtin",
    "path": "",
    "sources": "[]",
    "subset": "",
    "revision": "",
    "text_key": "text",
    "args": "{}",
}
SUFFIXES = ("bin", "ends", "json")
LOCK_FILE = ".lock"
OWNED = re.compile(r"(begun\.json|index\.json|shard-\d{5,}\.(bin|ends|json))(\.[0-9a-f]{32}\.tmp)?")
BEGUN_DRAFT = re.compile(r"begun\.json\.[0-9a-f]{32}\.tmp")


@reporting_errors
def main(arguments: list[str]) -> int:
    try:
        options, overrides = parse(arguments)
        if options.verify:
            return verify_folder(options.folder)
        config = load_config(options.config or CONFIG_FILE, overrides)
        data = pin_names(config, ["data.tokenizer"]).data
        prepare(
            options.folder,
            data,
            reserved=reserved_files(config.validation.sources, data),
            n_workers=options.workers or available_cpus(),
            shard_tokens=options.shard_tokens,
        )
        (source,) = data.mixture
        then = _train_arguments(options.folder, options.config, source)
        say(f"next: {command_text('train', *then)}")
    except KeyboardInterrupt:
        print("interrupted; run the same command to resume", file=sys.stderr)
        return exit_codes.PREEMPTED
    except WorkerDied as error:
        say(f"{error}; run the same command to resume", file=sys.stderr)
        return exit_codes.FAILED
    return exit_codes.DONE


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the tool's options; return them and the overrides of [data]."""
    own, overrides = split_overrides(arguments)
    for argument in overrides:
        key = argument.partition("=")[0]
        if key.startswith("--") and not key.startswith("--data."):
            raise ValueError(f"command line: {key} has no effect here; only --data.KEY has")
    parser = Parser("shardloom prepare", description=__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=path_argument, help="folder to write or resume")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="config of a run; default train_configs/debug_model.toml",
    )
    add(
        "--workers",
        type=whole_number(1),
        metavar="N",
        help="worker processes; default: available CPUs",
    )
    add(
        "--shard_tokens",
        type=whole_number(1),
        metavar="N",
        help=f"approximate size of a shard; default {SHARD_TOKENS}",
    )
    add("--verify", action="store_true", help="only verify the hashes of a prepared folder")
    options = parser.parse_args(own)
    if options.verify and (overrides or len(own) > 2):
        raise ValueError("argument --verify: takes only FOLDER")
    options.shard_tokens = options.shard_tokens or SHARD_TOKENS
    return options, overrides


def verify_folder(folder: Path) -> int:
    """Print each file of ``folder`` with a wrong hash; return the exit code."""
    n_files, n_wrong = 0, 0
    for path, problem in verify(folder):
        n_files += 1
        if problem:
            n_wrong += 1
            say(f"{path}: {problem}", file=sys.stderr)
    say(f"{folder}: {n_files - n_wrong} of {n_files} files have the recorded SHA-256")
    return exit_codes.BAD_CONFIG if n_wrong else exit_codes.DONE


def prepare(
    folder: Path, data: Data, *, reserved: Reserved, n_workers: int, shard_tokens: int
) -> None:
    """Write the missing shards and the index of ``folder``; print what it has.

    ``reserved``: files that must not be trained on. Raises ``ValueError`` for bad data, or if
    ``folder`` was begun with other settings.
    """
    if len(data.mixture) != 1:
        raise ValueError("data.sources: prepare each source of a mixture separately")
    source = data.mixture[0]
    if source.type == "tokens":
        raise ValueError("data.source: tokens are already prepared")
    skips_bad = data.on_bad_record == "skip"
    open_source = partial(open_documents, source, reserved=reserved, skips_bad=skips_bad)
    plan = _build_plan(data, open_source, shard_tokens)
    with _locked(folder):
        begun = _begin(folder, plan)
        n_shards = -(-begun["source"]["documents"] // begun["documents_per_shard"])
        if not (folder / TOKEN_INDEX_FILE).exists():
            shards = _finished_shards(folder, begun)
            missing = [number for number in range(n_shards) if number not in shards]
            progress = Progress(begun["source"]["documents"], list(shards.values()))
            tokenize(
                folder,
                open_source,
                begun,
                numbers=missing,
                n_workers=n_workers,
                progress=progress,
            )
            _publish_index(folder, begun, n_shards, max_bad=data.max_bad_records)
        index = read_index(folder)
        for shard in index["shards"]:
            check_sizes(folder, shard, DTYPES[index["dtype"]])
        # The index now contains the metadata of all shards.
        _remove(
            folder,
            {path.name for path in folder.iterdir() if path.suffix != ".json"} | {TOKEN_INDEX_FILE},
        )
    say(
        f"{folder}: {index['documents']:,} documents ({index['skipped']:,} empty and"
        f" {index['bad']:,} bad ones skipped), {index['tokens']:,} tokens of {index['dtype']},"
        f" {n_shards} shards"
    )


def _train_arguments(folder: Path, config_file: Path | None, text: DataSource) -> list[str]:
    """Arguments of the command ``train`` that read ``folder`` instead of the ``text``."""
    named, path = read_index(folder)["tokenizer"], literal_path(str(folder))
    keys = {"source": "tokens", "path": path}
    if kept := text.model_dump(include={"name", "repeat"}, exclude_defaults=True):
        # Only a table of [[data.sources]] has these.
        keys = {"sources": toml_text([{"type": "tokens", "path": path} | kept])}
    keys["tokenizer"] = literal_path(named["name"])
    keys |= {key: named[key] for key in ("bos", "eos") if named.get(key) is not None}
    if config_file is not None:
        # Keys of the text have no effect on tokens, so that train rejects them.
        given = read_toml(find_config(config_file))[0].get("data", {})
        keys |= {k: v for k, v in DEFAULTS_OF_TEXT.items() if k in given and k not in keys}
    overrides = [word for key, value in keys.items() for word in (f"--data.{key}", value)]
    return [*(run_name(folder) if config_file is None else [str(config_file)]), *overrides]


def _build_plan(data: Data, open_source: OpenSource, shard_tokens: int) -> dict[str, Any]:
    """Everything that the contents of the folder depend on."""
    source, skips_bad = data.mixture[0], data.on_bad_record == "skip"
    documents, fingerprint = open_source()
    tokenizer = load_tokenizer(data.tokenizer, bos=data.bos, eos=data.eos)
    if len(documents) == 0:
        raise ValueError("data.path: no documents")
    measured = evenly_spaced(len(documents), MEASURED_DOCUMENTS)
    tokens = 0
    for text in (documents[index] for index in measured):
        # A text that cannot be encoded is reported when its shard is written.
        with suppress(ValueError):
            tokens += len(tokenizer.encode_document(text)) if isinstance(text, str) else 0
    return {
        "format": FORMAT,
        "dtype": smallest_dtype(tokenizer.n_vocab),
        "tokenizer": {
            "name": data.tokenizer,
            "bos": data.bos,
            "eos": data.eos,
            "fingerprint": tokenizer.fingerprint,
        },
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
    """Create and lock ``folder``; raise ``ValueError`` if another process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    # Not the folder itself: NFS locks only what is open for writing.
    with (folder / LOCK_FILE).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: locked by another shardloom prepare") from None
        except OSError as error:
            raise ValueError(lock_error_text(folder / LOCK_FILE, error)) from None
        yield


def _begin(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Return the plan that ``folder`` was begun with; write ``plan`` if the folder is new."""
    found = {path.name for path in folder.iterdir()} - {LOCK_FILE}
    # Before the plan is written, nothing else is: what has these names is somebody else's.
    owned = OWNED if found & {BEGUN_FILE, TOKEN_INDEX_FILE} else BEGUN_DRAFT
    foreign = sorted(name for name in found if not owned.fullmatch(name))
    if foreign:
        text = f"{foreign[0]} is not a file of shardloom prepare; use a new folder"
        raise ValueError(f"{folder}: {text}")
    if (folder / TOKEN_INDEX_FILE).exists():
        begun = read_index(folder)
    elif (folder / BEGUN_FILE).exists():
        begun = _read_json(folder / BEGUN_FILE)
        if begun.get("format") != FORMAT:
            raise ValueError(f"{folder / BEGUN_FILE}: format is not {FORMAT}")
    else:
        atomic_write_bytes(folder / BEGUN_FILE, json.dumps(plan, indent=1).encode())
        return plan
    # Older plans have no bos and eos.
    if not _has_form(begun, plan | {"tokenizer": {"name": "", "fingerprint": ""}}):
        text = "a key is missing, or its value has another type or range"
        raise ValueError(f"{folder}: {BEGUN_FILE} or {TOKEN_INDEX_FILE}: {text}")
    then, now = ([p["source"], p["tokenizer"], p["shard_tokens"]] for p in (begun, plan))
    changes = []
    for what, old, new in zip(("documents", "tokenizer"), then, now, strict=False):
        if old["fingerprint"] != new["fingerprint"]:
            before, after = _named(old), _named(new)
            names = f"{before} has changed" if before == after else f"{before}, not {after}"
            changes.append(f"{what}: {names}")
    if then[2] != now[2]:
        changes.append(f"--shard_tokens: {then[2]}, not {now[2]}")
    # Records skipped so far stay skipped, so skip may not become error; the reverse is fine.
    if begun["skips_bad"] and not plan["skips_bad"]:
        changes.append("data.on_bad_record: skip, not error")
    if changes:
        raise ValueError(f"{folder} was begun with other settings: {'; '.join(changes)}")
    # The same tokenizer may have another path now.
    plan = begun | {key: plan[key] for key in ("tokenizer", "skips_bad")}
    if plan["skips_bad"] != begun["skips_bad"] and (folder / BEGUN_FILE).exists():
        # Also for a start after this one, which may be interrupted.
        atomic_write_bytes(folder / BEGUN_FILE, json.dumps(plan, indent=1).encode())
    return plan


def _named(part: dict[str, Any]) -> str:
    """Name of a plan's source or tokenizer, with the latter's data.bos and data.eos."""
    keys = [key for key in ("bos", "eos") if part.get(key) is not None]
    return part["name"] + "".join(f" with data.{key} {part[key]!r}" for key in keys)


def _finished_shards(folder: Path, begun: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Metadata of the finished shards by number; deletes the files of all others."""
    finished = {}
    for path in folder.glob("shard-*.json"):
        # A shard's metadata is written last, so its other files are complete.
        with suppress(ValueError, KeyError):
            shard = _read_json(path)
            check_sizes(folder, shard, DTYPES[begun["dtype"]])
            finished[int(path.stem.removeprefix("shard-"))] = shard
    keep = {f"{shard_name(number)}.{suffix}" for number in finished for suffix in SUFFIXES}
    _remove(folder, keep | {BEGUN_FILE})
    return finished


def _remove(folder: Path, keep: set[str]) -> None:
    for path in folder.iterdir():
        if OWNED.fullmatch(path.name) and path.name not in keep:
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
    atomic_write_bytes(
        folder / TOKEN_INDEX_FILE, encode_index({**begun, **counts, "shards": shards})
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_input(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def _has_form(value: Any, form: Any) -> bool:
    """True if ``value`` has the keys and types of ``form``; no integer is 0 or huge."""
    if isinstance(form, dict) and isinstance(value, dict):
        return all(key in value and _has_form(value[key], form[key]) for key in form)
    return type(value) is type(form) and (type(value) is not int or 0 < value < 2**53)


if __name__ == "__main__":
    # Like Ctrl-C.
    handle_signals(signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
