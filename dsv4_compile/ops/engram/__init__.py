"""Ops of the engram: rows of n-grams, their embeddings, and the gate."""
