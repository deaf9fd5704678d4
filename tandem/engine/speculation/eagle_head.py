"""The network of an EAGLE or EAGLE-3 head: one decoder layer with its own keys and values of each sequence.

    feature of position p, token p + 1 ──fc, layer──> feature of p + 1 ──head──> logits of token p + 2

EAGLE's features are the model's last hidden states, normed, and its output head is the model's. EAGLE-3's features are
the inputs of three layers of the model, which `fc` joins; its output head knows only frequent tokens (`d2t`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tandem.checkpoints import ModelFile, read_file
from tandem.engine.models import (
    MLP,
    Attention,
    Linear,
    ModelConfig,
    Scope,
    cos_sin,
    inverse_frequencies,
    read_model_config,
    rms_norm,
    unadapted,
)
from tandem.engine.speculation.features import FeatureRows
from tandem.engine.speculation.heads import HeadFile

UNKNOWN = -1e30  # the logit of tokens that a head does not know


class Eagle3File(ModelFile):
    """Fields of config.json that only an EAGLE-3 head has."""

    norm_before_residual: bool = False
    eagle_aux_hidden_state_layer_ids: Annotated[list[int], Field(min_length=3, max_length=3)] | None = None
    eagle_config: None = None  # not supported: it would number the layers differently


def tapped_layers(file: HeadFile, num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose inputs are an EAGLE-3 head's features; none for other heads. Raises ValueError."""
    if file.method != "eagle3":
        return ()
    said = _said(file).eagle_aux_hidden_state_layer_ids
    layers = tuple(said or (2, num_layers // 2, num_layers - 3))
    if sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < num_layers:
        problem = f"{list(layers)} are no three layers, in order, of a model of {num_layers}"
        raise ValueError(f"speculative_model: {file.folder}: eagle_aux_hidden_state_layer_ids: {problem}")
    return layers


def _said(file: HeadFile) -> Eagle3File:
    return read_file(Eagle3File, file.folder / "config.json")


class Ends(NamedTuple):
    """The model's own embedding and output weights: (vocab, hidden) each."""

    embed: Tensor
    lm_head: Tensor


class Context:
    """The head's keys and values of one sequence from position `first` on; the first `count` are of known tokens."""

    __slots__ = ("count", "features", "first", "kv")

    def __init__(self, first: int, features: Tensor, config: ModelConfig) -> None:
        self.first, self.count, self.features = first, 0, FeatureRows(first, features.clone())
        self.kv = features.new_empty(2, config.num_kv_heads, 0, config.head_dim)

    @property
    def end(self) -> int:
        return self.first + self.count

    def put(self, at: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k, v (tokens, kv_heads, head_dim) at index `at`; returns the keys and values up to their end."""
        end = at + len(k)
        if end > self.kv.shape[2]:
            grown = self.kv.new_empty(2, self.kv.shape[1], max(64, 2 * end), self.kv.shape[3])
            grown[:, :, :at] = self.kv[:, :, :at]
            self.kv = grown
        self.kv[0, :, at:end], self.kv[1, :, at:end] = k.transpose(0, 1), v.transpose(0, 1)
        return self.kv[0, :, :end], self.kv[1, :, :end]


class ContextPlace(NamedTuple):
    """The place of `rows` rows of a step in `context`: from index `at` on."""

    context: Context
    at: int
    rows: int


class EagleHead:
    """The network. Its weights have the dtype and device of `place`. Raises ValueError naming a wrong tensor."""

    def __init__(self, file: HeadFile, model: ModelConfig, ends: Ends, place: Tensor) -> None:
        three, self.folder = file.method == "eagle3", file.folder
        config = self.config = _layer_config(file)
        hidden, tensors = config.hidden_size, file.tensors
        width = 3 * model.hidden_size if three else 2 * hidden
        self._fc = Linear(width, {"fc": hidden}, "fc.bias" in tensors, place)
        self._attention, self._mlp = Attention(config, 0, place), MLP(config, 0, place)
        if three:
            self._attention.qkv = Linear(2 * hidden, self._attention.qkv.parts, config.qkv_bias, place)
        targets = dict(self._fc.checkpoint_tensors())
        targets |= {f"layer.{name}": tensor for name, tensor in self._attention.checkpoint_tensors()}
        targets |= {f"layer.{name}": tensor for name, tensor in self._mlp.checkpoint_tensors()}
        norms = {name: place.new_empty(hidden) for name in (*(_NORMS_3 if three else ()), _NORM)}
        if extra := sorted(tensors.keys() - targets.keys() - norms.keys() - _BESIDE):
            raise ValueError(f"speculative_model: {file.folder}: {len(extra)} extra tensors: {', '.join(extra[:5])}")
        for name, target in (targets | norms).items():
            target.copy_(file.take(name, *target.shape))
        self._norms = [norms[name] for name in _NORMS_3] if three else []
        self._post_norm, self._eps = norms[_NORM], config.rms_norm_eps
        self._residual_is_normed = three and _said(file).norm_before_residual
        self._embed = _own("embed_tokens.weight", file, ends.embed, (model.vocab_size, hidden), place)
        known = len(tensors["d2t"]) if three and "d2t" in tensors else model.vocab_size
        self._head = _own("lm_head.weight", file, ends.lm_head, (known, hidden), place)
        self._inverse = inverse_frequencies(config.rope, config.head_dim).to(place.device)
        self._known: Tensor | None = None
        self._vocab_size = model.vocab_size
        if "d2t" in tensors:
            self._known = (torch.arange(known) + file.take("d2t", known)).to(place.device)
            if not 0 <= int(self._known.min()) <= int(self._known.max()) < model.vocab_size:
                raise ValueError(f"speculative_model: {file.folder}: tensor d2t names tokens that the model has not")

    def __call__(self, features: Tensor, token_ids: Tensor, positions: Tensor, places: Items[ContextPlace]) -> Tensor:
        """Returns the features (rows, hidden) that follow `features`, which are the model's or the head's own."""
        embedded = F.embedding(token_ids, self._embed)
        if self._norms:
            x = features if features.shape[1] == self.config.hidden_size else self._fc(features)
            normed = rms_norm(x, self._norms[1], self._eps)
            inner = torch.cat([rms_norm(embedded, self._norms[0], self._eps), normed], dim=1)
            x = normed if self._residual_is_normed else x
        else:
            x = inner = self._fc(torch.cat([embedded, features], dim=1))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scope: Scope) -> Tensor:
            return _attend(q, k, v, places)

        x = x + self._attention(inner, cos_sin(self._inverse, positions, x.dtype), attend, unadapted)
        return x + self._mlp(rms_norm(x, self._post_norm, self._eps), unadapted)

    def logits(self, features: Tensor) -> Tensor:
        """Returns the logits (rows, vocab) float32 of features that the head computed."""
        found = F.linear(rms_norm(features, self._norms[2], self._eps) if self._norms else features, self._head).float()
        if self._known is None:
            return found
        return found.new_full((len(found), self._vocab_size), UNKNOWN).index_copy_(1, self._known, found)


_BESIDE = frozenset({"embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "layer.self_attn.rotary_emb.inv_freq"})
_NORM = "layer.post_attention_layernorm.weight"
_NORMS_3 = ("layer.input_layernorm.weight", "layer.hidden_norm.weight", "norm.weight")


def _layer_config(file: HeadFile) -> ModelConfig:
    try:
        config = read_model_config(file.folder)
    except ValueError as error:
        raise ValueError(f"speculative_model: {error}") from None
    biased = {kind: f"layer.self_attn.{kind}_proj.bias" in file.tensors for kind in "qo"}
    return replace(config, qkv_bias=biased["q"], o_bias=biased["o"], mlp_bias=False, qk_norm=False)


def _own(name: str, file: HeadFile, of_model: Tensor, shape: tuple[int, int], place: Tensor) -> Tensor:
    if name in file.tensors:
        return file.take(name, *shape).to(place)
    if of_model.shape != shape:
        raise ValueError(
            f"speculative_model: {file.folder}: tensor {name} is missing, and the model's has another shape"
        )
    return of_model.to(place)


def _attend(q: Tensor, k: Tensor, v: Tensor, places: Items[ContextPlace]) -> Tensor:
    out, start = torch.empty_like(q), 0
    for context, at, count in places:
        rows = slice(start, start + count)
        start += count
        keys, values = context.put(at, k[rows], v[rows])
        visible = None
        if count > 1:
            here = torch.arange(at, at + count, device=q.device)
            visible = torch.arange(at + count, device=q.device) <= here[:, None]
        found = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None], keys[None], values[None], attn_mask=visible, enable_gqa=True
        )
        out[rows] = found[0].transpose(0, 1)
    return out
