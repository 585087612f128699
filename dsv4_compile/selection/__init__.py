"""Everything that chooses the implementation of an op: costs, measurements, proofs and the recorded decisions."""
