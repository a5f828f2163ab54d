"""The local cache of the Hugging Face Hub, through ``huggingface_hub``: read it, and fill it."""

import hashlib
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.constants import HF_HOME as HF_HOME
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from config.hub_names import WEIGHT_FILES, HubName
from runtime.commands import command_text
from runtime.printable import first_line

# The cache names a file of Git LFS by its SHA-256, others by a hash of Git.
SHA256_DIGITS = 64


class NoNetwork(OSError):
    """Raised if the hub cannot be reached, or its connections drop."""

    def __init__(self, name: HubName, reason: str) -> None:
        self.reason = f"{name}: {reason}"
        super().__init__(f"{self.reason}. {_without_network(name)}")


def cached_folder(name: HubName, files: Sequence[str]) -> Path:
    """Folder in the cache with all files of the repository that match ``files``, patterns.

    The folder's name is the commit. Never connects to the hub. Raises ``ValueError`` that says how
    to fetch what is missing.
    """
    try:
        folder = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=[*files],
            local_files_only=True,
        )
        # Without the list of the repository's files, nobody knows whether the folder is complete.
        get_cached_repo_tree(name.repository, revision=Path(folder).name)
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        options = ["--weights"] if tuple(files) == WEIGHT_FILES else []
        command = command_text("fetch", *options, name)
        text = f"{name} is not completely in the local cache: run {command}"
        raise ValueError(f"{text}. {_without_network(name)}") from None
    except OSError as error:
        raise ValueError(f"{name}: {_cache_error(error)}") from None
    return Path(folder)


def download(name: HubName, files: Sequence[str]) -> Path:
    """Download what the cache lacks of ``files``, patterns; return the folder as above.

    Raises ``ValueError`` if the hub does not have it or does not give it, ``NoNetwork`` if the hub
    cannot be reached, and ``OSError`` if the disk fails.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        # First, because without the hub's answer snapshot_download returns an older commit.
        commit = HfApi().model_info(name.repository, revision=name.revision).sha
        folder = Path(
            snapshot_download(name.repository, revision=name.revision, allow_patterns=[*files])
        )
    except Exception as error:  # the library raises its own and its network library's errors
        raise _explained(name, error) from error
    if folder.name != commit:
        raise OSError(f"{name} moved from {commit} to {folder.name} meanwhile: run this again")
    _verify(folder, files)
    return folder


def files_in(folder: Path, files: Sequence[str]) -> list[Path]:
    """The files of a cached folder that match ``files``, patterns, in the order of their names."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = ((path, path.relative_to(folder).as_posix()) for path in found)
    return [path for path, name in names if any(fnmatch(name, pattern) for pattern in files)]


def _verify(folder: Path, files: Sequence[str]) -> None:
    """Delete files that do not have the SHA-256 in their names, and raise ``OSError``."""
    for path in files_in(folder, files):
        blob = path.resolve()
        if len(blob.name) != SHA256_DIGITS:
            continue
        with blob.open("rb") as file:
            is_whole = hashlib.file_digest(file, "sha256").hexdigest() == blob.name
        if not is_whole:
            blob.unlink()
            path.unlink()
            raise OSError(f"{path}: not the SHA-256 that the hub gave; deleted: run this again")


def _explained(name: HubName, error: Exception) -> Exception:
    """Error that says what to do about ``error``, from a connection to the hub or from the disk."""
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    command = command_text("python", "-m", "huggingface_hub.cli.hf", "auth", "login")
    login = f"set HF_TOKEN, or run `{command}`"
    match error:
        case GatedRepoError():
            page = f"{constants.ENDPOINT}/{name.repository}"
            return ValueError(
                f"{name} is gated: accept its terms at {page}; then, with a token of that account,"
                f" {login}"
            )
        case RevisionNotFoundError():
            return ValueError(f"{name}: {name.repository} has no revision {name.revision}")
        case RepositoryNotFoundError():
            text = f"no such repository at {constants.ENDPOINT}, or a private one"
            return ValueError(f"{name}: {text}: for that, {login}")
        case HfHubHTTPError():
            advice = "run this again later"
            if error.response.status_code in (401, 403):
                advice = f"if the repository is private or gated, {login}"
            return ValueError(f"{name}: {_line(error)}: {advice}")
        case OSError() if error.errno is not None:
            return OSError(f"{name}: {_cache_error(error)}")
        case ValueError():
            return ValueError(f"{name}: {_line(error)}")
        case OfflineModeIsEnabled():
            text = "the environment variable HF_HUB_OFFLINE is set"
        case _:
            text = f"cannot download from {constants.ENDPOINT}: {_line(error)}; run this again"
    return NoNetwork(name, text)


def _without_network(name: HubName) -> str:
    """Advice for a machine without network."""
    repository = f"models--{name.repository.replace('/', '--')}"
    return (
        f"Without network, fetch it on another machine and copy {repository} from its cache to"
        f" {constants.HF_HUB_CACHE} (HF_HOME moves it), or name a folder with the files instead"
    )


def _cache_error(error: OSError) -> str:
    text = f"the cache {constants.HF_HUB_CACHE} cannot be used"
    return f"{text}: {error.strerror}; the environment variable HF_HOME moves it"


def _line(error: Exception) -> str:
    """First line of an error's text, or its type if it has none."""
    return first_line(str(error)) or type(error).__name__
