"""Schemas, fakes and argument checks: GEMMs with e4m3 block-scaled weights and grouped projections."""
