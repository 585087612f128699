"""Ops of hyper-connections: several residual streams, mixed by coefficients that depend on the token."""
