"""Making the proposer of published heads, from their file and the weights that they share with the model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.forward import Observer, Taps
from tandem.engine.models import ModelConfig, rms_norm
from tandem.engine.sampling import Choose
from tandem.engine.speculation.eagle import EagleProposer
from tandem.engine.speculation.eagle_head import EagleHead, Ends
from tandem.engine.speculation.heads import HeadFile
from tandem.engine.speculation.medusa import MedusaProposer, medusa_heads
from tandem.engine.speculation.proposer import Proposer
from tandem.engine.weights import read_tensors

NORM, EMBED, LM_HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"


class HeadProposer(Proposer, Observer, Protocol):
    """A proposer that observes the model's steps and proposes from the states it has seen."""


def head_proposer(
    file: HeadFile, path: Path, model: ModelConfig, taps: Taps, choose: Choose, place: Tensor
) -> HeadProposer:
    """Makes the proposer of the heads in `file` for the `model` at `path`.

    It computes in the dtype and on the device of `place`. Raises ValueError naming a wrong tensor.
    """
    of_model = read_tensors(path, NORM, EMBED, LM_HEAD)
    norm = of_model[NORM].to(place)

    def last(hidden: Tensor) -> Tensor:
        return rms_norm(hidden, norm, model.rms_norm_eps)

    def tapped(hidden: Tensor) -> Tensor:
        return torch.cat(taps.rows, dim=1)

    if file.method == "medusa":
        return MedusaProposer(medusa_heads(file, model.hidden_size, model.vocab_size, place), last, choose)
    head = EagleHead(file, model, Ends(of_model[EMBED], of_model.get(LM_HEAD, of_model[EMBED])), place)
    return EagleProposer(file.method, head, tapped if file.method == "eagle3" else last, choose)
