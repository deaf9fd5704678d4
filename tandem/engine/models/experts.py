"""A mixture of experts: each token is computed by a few MLPs of many, which a router chooses for it.

x ─ router ─> k experts a token, and shares ─> rows sorted by expert ─> each expert's MLP ─> sum weighted by shares
└─ an MLP that computes all tokens, where the family has one ──────────────────────────────────────(+)─> out
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.engine.models.config import ExpertsConfig, ModelConfig
from tandem.engine.models.linear import Adapt, Linear, linear, unadapted
from tandem.engine.models.mlp import MLP


class ExpertChooser:
    """Chooses the experts that compute each token, and their shares."""

    def __init__(self, config: ExpertsConfig, hidden: int, place: Tensor) -> None:
        self._config, self.weight = config, place.new_empty(config.count, hidden)
        self.bias = place.new_empty(config.count) if config.router_bias else None
        # Added to the float32 scores when experts are chosen, but not when shares are computed.
        self.correction = place.new_empty(config.count, dtype=torch.float32) if config.has_correction else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the experts' numbers and their shares, (tokens, experts of each) both."""
        config = self._config
        wide = config.has_wide_router
        scores = linear(x.float() if wide else x, self.weight.float() if wide else self.weight, self.bias).float()
        if config.scoring == "chosen":
            values, chosen = scores.topk(config.per_token)
            return chosen, values.softmax(dim=-1).to(x.dtype)
        scores = scores.softmax(dim=-1) if config.scoring == "softmax" else scores.sigmoid()
        chosen = self._chosen(scores if self.correction is None else scores + self.correction)
        shares = scores.gather(1, chosen)
        if config.is_normed:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + config.norm_floor)
        shares = shares * config.scale if config.scale != 1 else shares
        return chosen, shares if wide else shares.to(x.dtype)

    def _chosen(self, scores: Tensor) -> Tensor:
        config = self._config
        if config.groups > 1:
            groups = scores.view(len(scores), config.groups, -1)
            best = groups.topk(config.of_group).values.sum(dim=-1).topk(config.chosen_groups).indices
            is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
            scores = groups.masked_fill(is_out[..., None], 0.0 if config.of_group == 1 else -torch.inf).flatten(1)
        return scores.topk(config.per_token).indices

    def checkpoint_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self.weight
        if self.bias is not None:
            yield f"{name}.bias", self.bias
        if self.correction is not None:
            yield f"{name}.e_score_correction_bias", self.correction


class Experts:
    """A mixture of experts in the place of a layer's MLP; adapters do not change it."""

    def __init__(self, config: ModelConfig, layer: int, place: Tensor) -> None:
        assert config.experts is not None
        self._config = experts = config.experts
        self.router = ExpertChooser(experts, config.hidden_size, place)
        self.experts = [
            MLP(config, layer, place, f"{experts.name}.experts.{number}", experts.inner, experts.parts)
            for number in range(experts.count)
        ]
        self.shared: MLP | None = None
        self.shared_gate: Tensor | None = None
        if experts.shared_inner:
            self.shared = MLP(config, layer, place, f"{experts.name}.{experts.shared_name}", experts.shared_inner)
            self.shared_gate = place.new_empty(1, config.hidden_size) if experts.has_shared_gate else None

    def __call__(self, x: Tensor, adapt: Adapt) -> Tensor:
        chosen, shares = self.router(x)
        out = self._summed(self._computed(x, chosen), shares).to(x.dtype)
        if self.shared is None:
            return out
        of_all = self.shared(x, unadapted)
        return out + (of_all if self.shared_gate is None else linear(x, self.shared_gate).sigmoid() * of_all)

    def _computed(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Returns the chosen experts' outputs for each token: (tokens, experts of each, hidden_size)."""
        of_pairs = chosen.flatten()
        by_expert, ends = of_pairs.argsort(stable=True), of_pairs.bincount(minlength=len(self.experts)).cumsum(0)
        out, start = x.new_empty(len(of_pairs), x.shape[1]), 0
        for expert, end in zip(self.experts, ends.tolist(), strict=True):
            if end > start:
                pairs = by_expert[start:end]
                out[pairs] = expert(x[pairs // chosen.shape[1]], unadapted)
            start = end
        return out.view(*chosen.shape, -1)

    @staticmethod
    def _summed(computed: Tensor, shares: Tensor) -> Tensor:
        """Sums the experts' outputs, weighted by shares, in a fixed order, so other tokens cannot change a token's
        sum.
        """
        out = computed[:, 0] * shares[:, 0, None]
        for i in range(1, shares.shape[1]):
            out = out + computed[:, i] * shares[:, i, None]
        return out

    def linears(self) -> tuple[Linear, ...]:
        of_all = self.shared.linears() if self.shared else ()
        return *(part for expert in self.experts for part in expert.linears()), *of_all

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.router.checkpoint_tensors(f"{self._config.name}.{self._config.router_name}")
        for part in self.linears():
            yield from part.checkpoint_tensors()
        if self.shared_gate is not None:
            yield f"{self._config.name}.shared_expert_gate.weight", self.shared_gate
