"""Small checkpoint, written in this process without training."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from checkpoint.checkpoint_dir import write_metadata
from checkpoint.tensor_files import lay_out, write_tensor_file
from checkpoint.tensor_index import index_content, write_index
from models import find_spec
from models.meta import build_on_meta
from saved_model import PREFIX
from tests.lib.layouts import small_args
from tools.convert import _item


def write_checkpoint(folder: Path, **metadata: Any) -> Path:
    """Write a small Llama's weights, all 0.01, to ``folder``; return it.

    ``metadata`` replaces keys of the manifest.
    """
    # More than the ids of the tokenizer "bytes".
    args = replace(small_args("llama3", "debugmodel"), vocab_size=264)
    state = build_on_meta(find_spec("llama3"), args, torch.float32).state_dict()
    folder.mkdir(parents=True)
    items = [_item(fqn, tensor.shape, tensor.dtype) for fqn, tensor in state.items()]
    name = "part-00000.bin"
    values = {fqn: torch.full(tensor.shape, 0.01) for fqn, tensor in state.items()}
    described = write_tensor_file(
        folder / name, items, lambda item: values[item.index.fqn.removeprefix(PREFIX)]
    )
    files = {name: described} | write_index(folder, index_content([lay_out(name, items)]))
    usual = {
        "config": {"model": {"name": "llama3"}, "data": {"tokenizer": "bytes"}},
        "model_args": asdict(args),
        "step": 1,
        "world_size": 1,
        "run": "a",
        "attempt": "a",
        "parent": None,
    }
    write_metadata(folder, files, state={}, metadata=usual | metadata)
    return folder
