"""Schemas, fakes and argument checks of the mixture of experts: the router and the experts."""
