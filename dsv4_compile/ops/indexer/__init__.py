"""Schemas, fakes and argument checks: the indexer: queries, scores and top-k."""
