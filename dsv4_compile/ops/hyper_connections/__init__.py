"""Residual streams: their coefficients, their mix for a sub-layer, and its return."""
