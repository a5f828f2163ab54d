"""Download what runs need of the Hugging Face Hub: ``./shardloom fetch NAME_OR_CONFIG ...``

NAME is hf:OWNER/NAME or hf:OWNER/NAME@REVISION: its tokenizer and config.json, and with --weights
its safetensors. CONFIG, a TOML file or a name of train_configs/: what data.tokenizer, model.flavor
and checkpoint.initial_load_path name. The files go to the cache of huggingface_hub, where runs find
them; runs never download.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from checkpoint.hugging_face import CONFIG_FILE, Folder
from config import load_config
from config.hub_names import (
    CONFIG_FILES,
    FILES,
    PREFIX,
    TOKENIZER_FILES,
    WEIGHT_FILES,
    HubName,
    is_hub_name,
    parse_hub_name,
)
from config.job_config import Data
from data.tokenizer import load_tokenizer
from models import MODEL_SPECS, find_family
from runtime import exit_codes
from runtime.filesystem import read_input
from runtime.hub_cache import NoNetwork, cached_folder, download, files_in
from runtime.log import say
from tools.cli import Parser, path_text, reporting_errors


@dataclass(frozen=True)
class Wanted:
    """Files, patterns, of a repository."""

    name: HubName
    files: tuple[str, ...]
    data: Data | None
    """Markers of the run that reads its tokenizer; None if it may have none."""


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser("shardloom fetch", description=__doc__)
    add = parser.add_argument
    add(
        "names",
        metavar="NAME_OR_CONFIG",
        nargs="+",
        type=path_text,
        help="hf:NAME, or a configuration",
    )
    add("--weights", action="store_true", help="of each NAME, fetch the weights, too")
    options = parser.parse_args(arguments)
    for text in options.names:
        # A name of the hub has an owner.
        if text.endswith(".toml") or not re.search(r"[/:]", text):
            wanted = named_by(Path(text))
        else:
            is_bare = text.count("/") == 1 and ":" not in text
            name = parse_hub_name(PREFIX + text if is_bare else text)
            files = WEIGHT_FILES if options.weights else TOKENIZER_FILES
            wanted = [Wanted(name, files, None if options.weights else Data())]
        for each in wanted:
            fetch(each)
    return exit_codes.DONE


def named_by(path: Path) -> list[Wanted]:
    """Find what a configuration names; load a tokenizer that is not on the hub."""
    config = load_config(path, [])
    found: dict[HubName, Wanted] = {}
    for key, files in FILES.items():
        section, _, name = key.partition(".")
        text = getattr(getattr(config, section), name)
        if is_hub_name(text):
            # Weights include the tokenizer's files, and those config.json.
            data = config.data if text == config.data.tokenizer else None
            wanted = Wanted(parse_hub_name(text), files, data)
            found[wanted.name] = max(wanted, found.get(wanted.name, wanted), key=n_files)
        elif files is TOKENIZER_FILES:
            # tiktoken downloads its own encodings.
            tokenizer = load_tokenizer(text, bos=config.data.bos, eos=config.data.eos)
            say(f"{path}: data.tokenizer = {text}: {tokenizer.n_vocab:,} tokens, not of the hub")
    if not found:
        say(f"{path}: names nothing of the hub")
    return [*found.values()]


def n_files(wanted: Wanted) -> int:
    return len(wanted.files)


def fetch(wanted: Wanted) -> None:
    """Download what is missing; print what there is, and the TOML that uses it.

    Raises ``ValueError`` if the files are not there or cannot be used, ``OSError`` as ``download``.
    """
    name = wanted.name
    try:
        folder = download(name, wanted.files)
    except NoNetwork as error:
        try:
            folder = cached_folder(name, wanted.files)
        except ValueError:
            raise error from None
        say(f"{error.reason}; the cache has it already", file=sys.stderr)
    files = files_in(folder, wanted.files)
    size = sum(path.stat().st_size for path in files)
    say(f"{name}: commit {folder.name}, {len(files)} files, {size:,} bytes in {folder}")
    if not files:
        raise ValueError(f"{name} has none of the files {', '.join(wanted.files)}")
    if wanted.files == WEIGHT_FILES:
        Folder(folder)
        say("[checkpoint]", f'initial_load_path = "{name}"')
    if wanted.files != CONFIG_FILES:
        describe_tokenizer(wanted, folder)
    describe_model(name, folder)


def describe_tokenizer(wanted: Wanted, folder: Path) -> None:
    """Print the TOML for the tokenizer, or why there is none; ``ValueError`` if a run needs it."""
    data = wanted.data or Data()
    try:
        tokenizer = load_tokenizer(str(folder), bos=data.bos, eos=data.eos)
    except ValueError as error:
        if wanted.data is not None:
            raise
        say(f"no tokenizer: {error}")
        return
    form = f"{tokenizer.n_vocab:,} tokens, documents are {tokenizer.document_form}"
    say("[data]", f'tokenizer = "{wanted.name}"  # {form}')


def describe_model(name: HubName, folder: Path) -> None:
    """Print the TOML for the model of ``config.json``, or why there is none."""
    try:
        config = json.loads(read_input(folder / CONFIG_FILE))
        family = find_family(config)
        published = MODEL_SPECS[family].hugging_face
        assert published is not None, "a family by its model_type"
        args = published.args(config)
    except (AttributeError, OSError, RecursionError, ValueError) as error:
        reason = "not there" if isinstance(error, FileNotFoundError) else error
        say(f"no model: {CONFIG_FILE}: {reason}")
        return
    say("[model]", f'name = "{family}"', f'flavor = "{name}"', f"vocab_size = {args.vocab_size}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
