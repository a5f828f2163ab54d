"""Label value that cross entropy ignores."""

IGNORE_INDEX = -100
"""Label of a position without a target; PyTorch's default ``ignore_index``."""
