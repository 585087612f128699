"""Schemas, fakes and argument checks: sparse-MLA decode and prefill, and the inverse RoPE of their output."""
