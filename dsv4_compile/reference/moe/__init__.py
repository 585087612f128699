"""Reference implementations of the mixture of experts: the router and the experts."""
