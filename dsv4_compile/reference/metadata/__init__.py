"""PyTorch definitions: batch metadata and index maps."""
