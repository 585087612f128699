"""Sparse attention over paged caches and workspaces, and the inverse RoPE of its output."""
