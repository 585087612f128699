"""Block-scaled and grouped GEMMs."""
