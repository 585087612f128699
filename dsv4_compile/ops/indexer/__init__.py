"""Queries, scores and top-k of the indexer."""
