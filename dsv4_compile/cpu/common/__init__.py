"""Rows of caches, as several ops read and write them on a CPU."""
