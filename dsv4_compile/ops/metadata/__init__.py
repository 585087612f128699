"""Slots, index rows and lengths of a batch."""
