"""Models that are split over several GPUs of one host: tensor and expert parallel, through `torch.distributed`."""

from __future__ import annotations

from .collectives import all_gather, all_reduce, gather_objects
from .ranks import Ranks
from .split import EXPERT_LAYOUTS, attention_config, split_of

__all__ = [
    "EXPERT_LAYOUTS",
    "Ranks",
    "all_gather",
    "all_reduce",
    "attention_config",
    "gather_objects",
    "split_of",
]
