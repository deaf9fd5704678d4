"""A model as its decoder needs it: sizes, and what its family adds to a Llama or leaves out."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.quantization import CheckpointFormat


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies by their `kind`.

    default
    linear     all slowed by `factor`
    llama3     the slow ones slowed: those that turn less than `low_freq_factor` times in the original context
    yarn       the same between `beta_slow` and `beta_fast` turns; `whole_pairs`: the bounds are pairs, not between them
    longrope   each pair by its own of `factors`

    What is turned is also multiplied by `attention_factor`.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    whole_pairs: bool = True
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """`per_token` of `count` experts compute each token, in `layers`. `scoring`: softmax or sigmoid of all scores, or
    softmax of the chosen ones.

    Of `groups` the `chosen_groups` best are chosen from first, each as good as its `of_group` best experts are.
    """

    count: int
    per_token: int
    inner: int
    layers: frozenset[int]
    name: str = "mlp"  # in a layer of a checkpoint
    router_name: str = "gate"
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    is_stacked: bool = False  # one tensor of the checkpoint has a layer of all experts
    scoring: str = "softmax"
    is_normed: bool = False  # shares of the chosen sum up to one
    norm_floor: float = 0.0
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    of_group: int = 1
    router_bias: bool = False
    has_correction: bool = False  # to scores where experts are chosen
    has_wide_router: bool = False  # float32
    shared_inner: int = 0  # of an MLP that computes all tokens
    shared_name: str = ""
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Numbers of a latent (`rank`) and of the key that is turned beside it, of each head's own part of a key and of its
    value; of what queries are made of, 0 where that is the layer's input."""

    rank: int
    turned: int
    key: int
    value: int
    query: int
    eps: float = 1e-6  # of the norms of latents


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder. `max_model_len` counts prompt and answer; `dtype` is what the weights were saved in."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: str
    norm_names: tuple[str, str, str, str]  # before and behind attention, before and behind the MLP; "": none
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    quantized: CheckpointFormat | None = None  # how the checkpoint holds its linear layers
    fused_qkv: bool = False  # one layer of the checkpoint
    fused_gate_up: bool = False
    # What makes a family another one than Llama, where it is set.
    qk_norm_of_all: bool = False  # over all heads at once
    norms_from_one: bool = False  # their weights say how far they are from 1
    activation: str = ""  # gelu_tanh, clamped_swiglu; else silu
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None  # of whose vectors head_dim is one half, and of which there is one KV head
    embed_scale: float = 0.0
    residual_scale: float = 0.0
    logits_divisor: float = 0.0
    logits_softcap: float = 0.0
    attention_scale: float = 0.0  # of scores, where it is not 1 / sqrt(head_dim)
    attention_softcap: float = 0.0
    attention_sinks: bool = False
    windows: tuple[int, ...] = ()  # of each layer, how many tokens are seen; 0: all
    local_rope: Rope | None = None  # of `local_layers`
    local_layers: frozenset[int] = frozenset()
    rotary_dim: int = 0  # of a head's numbers those that are turned, where not all are
    rope_interleaved: bool = False
    layers_without_rope: frozenset[int] = frozenset()

    @property
    def multiplications(self) -> int:
        """Multiplications of one token with all layers' weights; attention, embedding and head are left out."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        if (latent := self.latent) is not None:
            of_heads = self.num_heads * (latent.key + latent.turned)
            attention = self.hidden_size * (latent.rank + latent.turned + self.num_heads * latent.value)
            attention += of_heads * (latent.query or self.hidden_size) + self.hidden_size * latent.query
            attention += self.num_heads * latent.rank * (latent.key + latent.value)
        inner = self.num_layers * self.intermediate_size
        if (experts := self.experts) is not None:
            of_each = experts.per_token * experts.inner + experts.shared_inner
            inner += len(experts.layers) * (of_each - self.intermediate_size)
        return self.num_layers * attention + 3 * self.hidden_size * inner
