"""From logits to tokens: sampling, grammars, the budget of thoughts. For runners, kernels and speculation."""

from tandem.engine.sampling.guided import Masks, NamedGuide
from tandem.engine.sampling.sampler import Choose, choose, draw, reported, sample

__all__ = [
    "Choose",
    "Masks",
    "NamedGuide",
    "choose",
    "draw",
    "reported",
    "sample",
]
