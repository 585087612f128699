"""Norms, RoPE, cache inserts and compressors on a CPU."""
