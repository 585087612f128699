"""The indexer on a CPU."""
