"""Hyper-connections on a CPU."""
