"""Schemas, fakes and argument checks of speculative decoding: acceptance of drafts and the Markov head."""
