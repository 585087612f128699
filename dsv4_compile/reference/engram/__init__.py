"""PyTorch definitions: the engram, a memory of n-grams of token ids."""
