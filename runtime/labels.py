"""What the loader says of a token to the loss."""

IGNORED = -100
"""The label of a position that nothing is learned from; also PyTorch's default."""
