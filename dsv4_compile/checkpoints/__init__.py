"""Checkpoint folders as data from strangers: bounded, typed reading of their JSON, headers and tensors.

Nothing in a folder is executed, no file outside of it is opened, and errors are reported in bounded time and memory.
"""
