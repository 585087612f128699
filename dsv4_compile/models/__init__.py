"""Models as plain modules on this package's ops, where transformers has no class for them."""
