"""Continuous batching of a converted model: requests, steps, sampling."""
