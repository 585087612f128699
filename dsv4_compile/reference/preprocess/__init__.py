"""PyTorch definitions: norms, RoPE, cache inserts and compressors."""
