"""Readable PyTorch: the definition of every op. Runs on any device, never synchronises, never branches on data."""
