"""Schemas, fakes and argument checks: helpers that several families share."""
