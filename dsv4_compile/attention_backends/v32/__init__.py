"""DeepSeek-V3.2: its attention backend, indexer and layer; the rest of this package is for DeepSeek-V4."""
