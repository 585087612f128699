"""DeepSeek-V3.2: its attention backend, indexer and layer, another model than the rest of this package."""
