"""Read a checkpoint's tensors without running code from its files.

DCP's ``.metadata`` is a pickle, and a pickle is a program: only what a list of tensors needs may be
named in it. The tensors themselves DCP reads with ``weights_only=True``.
"""

import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

METADATA_FILE = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
# BytesStorageMetadata is missing on purpose: DCP unpickles whatever an entry of that kind holds.
ALLOWED = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
}


class Reader(dcp.FileSystemReader):
    """DCP's reader, for tensors only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list of tensors; raise ``UnpicklingError`` if the file names anything else."""
        with (Path(self.path) / METADATA_FILE).open("rb") as file:
            return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint")
        return super().find_class(module, name)


def unlisted(folder: Path, files: Collection[str]) -> list[str]:
    """What is wrong with the ``.metadata`` of ``folder``: it reads nothing but ``files``."""
    try:
        storage = Reader(folder).read_metadata().storage_data
        others = sorted({entry.relative_path for entry in storage.values()} - set(files))
    except Exception as error:  # There is no end to what bad bytes raise.
        return [f"{folder / METADATA_FILE}: {error}"]
    return [f"{folder / name}: not in the manifest" for name in others]
