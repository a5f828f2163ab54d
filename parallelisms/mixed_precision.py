"""One policy of dtypes for every data-parallel mode."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from config.job_config import Training
from runtime.distributed import compute_dtype


def mixed_precision_policy(training: Training, device: torch.device) -> MixedPrecisionPolicy:
    """Dtypes of compute and of reduction: the weights' own, unless that is float32."""
    is_mixed = training.dtype == "float32"
    reduce_dtype = training.mixed_precision_reduce if is_mixed else training.dtype
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype(training, device),
        reduce_dtype=getattr(torch, reduce_dtype),
        # The blocks' rope must keep its precision.
        cast_forward_inputs=False,
    )
