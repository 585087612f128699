"""PyTorch definitions: the indexer: queries, scores and top-k."""
