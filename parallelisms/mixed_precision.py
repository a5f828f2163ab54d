"""One policy of dtypes for every data-parallel mode."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from config.job_config import Training
from runtime.distributed import compute_dtype


def mixed_precision_policy(training: Training, device: torch.device) -> MixedPrecisionPolicy:
    """Dtypes of compute, reduction and logits; the first two are the weights', if not float32."""
    is_mixed = training.dtype == "float32"
    reduce_dtype = training.mixed_precision_reduce if is_mixed else training.dtype
    output_dtype = training.mixed_precision_output
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype(training, device),
        reduce_dtype=getattr(torch, reduce_dtype),
        output_dtype=None if output_dtype == "auto" else getattr(torch, output_dtype),
        # The blocks' rope must keep its precision.
        cast_forward_inputs=False,
    )
