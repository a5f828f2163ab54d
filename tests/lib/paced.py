"""Model of long runs that wait for something else: its steps take time, but hardly any CPU time."""

import time
from dataclasses import replace
from typing import Any

import torch

from models.llama3 import SPEC
from models.transformer import Transformer

SECONDS = 0.05


class PacedTransformer(Transformer):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(SECONDS)
        return super().forward(*args, **kwargs)


PACED = replace(SPEC, model_cls=PacedTransformer)
"""Named ``tests.lib.paced:PACED`` in configurations."""
