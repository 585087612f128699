"""PyTorch definitions: sparse-MLA decode and prefill, and the inverse RoPE of their output."""
