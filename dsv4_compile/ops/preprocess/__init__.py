"""Schemas, fakes and argument checks: norms, RoPE, cache inserts and compressors."""
