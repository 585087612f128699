"""Helpers of several families: schemas, fakes and argument checks."""
