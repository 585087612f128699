"""PyTorch definitions: helpers that several families share."""
