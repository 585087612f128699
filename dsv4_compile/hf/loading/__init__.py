"""Checkpoint folders: configuration, headers, the place of each stored tensor, loading."""
