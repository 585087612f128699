"""Linear layers on a CPU."""
