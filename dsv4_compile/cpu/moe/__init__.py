"""Mixture of experts on a CPU."""
