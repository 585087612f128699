"""Index rows on a CPU."""
