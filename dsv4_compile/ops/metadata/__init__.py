"""Schemas, fakes and argument checks: batch metadata and index maps."""
