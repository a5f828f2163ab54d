"""What the loader tells the loss about a token."""

IGNORED = -100
"""The label of a position that nothing is learned from; also PyTorch's default."""
