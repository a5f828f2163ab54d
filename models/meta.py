"""Models on the meta device: shapes and dtypes without memory."""

from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from models.model_spec import ModelSpec
from models.transformer import TransformerArgs


def build_on_meta(spec: ModelSpec, args: TransformerArgs, dtype: torch.dtype) -> nn.Module:
    """Build the model on the meta device; ``to_empty`` and ``init_weights`` then fill it."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), _WithoutInit():
            return spec.model_cls(args)
    finally:
        torch.set_default_dtype(default_dtype)


class _WithoutInit(TorchFunctionMode):
    """Skip the modules' own initialization: a no-op on meta tensors that imports the compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))
