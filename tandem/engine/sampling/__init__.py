"""Sampling: tokens from logits, grammars, the budget of thoughts. The engine, kernels and speculation may enter."""

from tandem.engine.sampling.guided import Masks, NamedGuide
from tandem.engine.sampling.sampler import NO_TOKEN, Choose, choose, chosen, draw, reported, sample

__all__ = [
    "NO_TOKEN",
    "Choose",
    "Masks",
    "NamedGuide",
    "choose",
    "chosen",
    "draw",
    "reported",
    "sample",
]
