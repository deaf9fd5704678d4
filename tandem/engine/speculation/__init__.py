"""Speculative decoding: tokens proposed ahead, computed in one step, kept as far as drawn. The engine may enter.

    plan: how many each ──> proposer: which ──> Runner: k + 1 rows, a token drawn from each ──> accepted, plan.measure

A draw depends on (seed, index) alone, so a proposed token is accepted if and only if it is the token that plain
decoding would have drawn there: the answer is the same, in fewer steps.
"""

from tandem.engine.speculation.draft import DraftProposer
from tandem.engine.speculation.eagle_head import tapped_layers
from tandem.engine.speculation.heads import HeadFile, read_head
from tandem.engine.speculation.made import head_proposer
from tandem.engine.speculation.plan import Plan
from tandem.engine.speculation.proposer import NgramProposer, Proposer
from tandem.engine.speculation.speculator import Speculator

__all__ = [
    "DraftProposer",
    "HeadFile",
    "NgramProposer",
    "Plan",
    "Proposer",
    "Speculator",
    "head_proposer",
    "read_head",
    "tapped_layers",
]
