"""Norms, RoPE, cache inserts, gathers and compressors."""
