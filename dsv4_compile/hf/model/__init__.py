"""A converted model: its modules, caches, checks of calls, comparisons and ranks."""
