"""Mixed precision policy of all data-parallel modes."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from config.job_config import Training
from runtime.distributed import compute_dtype


def mixed_precision_policy(training: Training, device: torch.device) -> MixedPrecisionPolicy:
    """Dtypes of compute and of gradient reduction; both ``training.dtype`` unless it is float32."""
    is_mixed = training.dtype == "float32"
    reduce_dtype = training.mixed_precision_reduce if is_mixed else training.dtype
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype(training, device),
        reduce_dtype=getattr(torch, reduce_dtype),
        # Casting the blocks' inputs would round the rope table.
        cast_forward_inputs=False,
    )
