"""Speculative decoding: acceptance of drafts, and the Markov head that chooses them."""
