"""Definitions of the hyper-connection ops."""
