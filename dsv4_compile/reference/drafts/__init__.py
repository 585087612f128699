"""Reference implementations of speculative decoding: random numbers, acceptance of drafts, and the Markov head."""
