"""Forms of speculative decoding for CPUs: no distribution is computed for greedy requests."""
