"""Plug-ins that let serving engines run on this package, outside the engines' trees."""
