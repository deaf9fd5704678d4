"""A model's config for its decoder: sizes, and how its family differs from Llama."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.quantization import CheckpointFormat


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies by their `kind`.

    default
    linear     all frequencies divided by `factor`
    llama3     only slow frequencies divided: those that turn less than `low_freq_factor` times in the original context
    yarn       the same between `beta_slow` and `beta_fast` turns; `whole_pairs`: the bounds are rounded to whole pairs
    longrope   each pair's frequency divided by its own number of `factors`

    Rotated numbers are also multiplied by `attention_factor`.
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
    """A mixture of experts: `per_token` of `count` experts compute each token in `layers`.

    `scoring`: softmax or sigmoid of all scores, or "chosen": softmax of the chosen experts' scores. Experts are chosen
    from the `chosen_groups` best of `groups` groups; a group's score is the sum of its `of_group` best experts' scores.
    """

    count: int
    per_token: int
    inner: int
    layers: frozenset[int]
    name: str = "mlp"  # the module's name within a layer of a checkpoint
    router_name: str = "gate"
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    is_stacked: bool = False  # one tensor of the checkpoint holds a layer's weights of all experts
    scoring: str = "softmax"
    is_normed: bool = False  # the chosen experts' shares are scaled to sum up to 1
    norm_floor: float = 0.0
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    of_group: int = 1
    router_bias: bool = False
    has_correction: bool = False  # scores get a correction when experts are chosen
    has_wide_router: bool = False  # the router computes in float32
    shared_inner: int = 0  # the inner size of an MLP that computes all tokens; 0: there is none
    shared_name: str = ""
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The sizes of latent attention: of a latent (`rank`), of the rotated key beside it (`turned`), of each head's
    unrotated key (`key`) and value (`value`), and of the latent of queries (`query`; 0: queries have none)."""

    rank: int
    turned: int
    key: int
    value: int
    query: int
    eps: float = 1e-6  # epsilon of the latents' norms


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's config. `max_model_len` counts prompt and answer; `dtype` is the dtype of the saved weights."""

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
    norm_names: tuple[str, str, str, str]  # before and after attention, before and after the MLP; "": none
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    quantized: CheckpointFormat | None = None  # the format of quantized linear layers in the checkpoint
    fused_qkv: bool = False  # the checkpoint has q, k and v as one layer
    fused_gate_up: bool = False
    # The fields below, where set, are differences from Llama.
    qk_norm_of_all: bool = False  # q and k are normalized over all heads together
    norms_from_one: bool = False  # norms multiply by 1 + weight
    norms_centered: bool = False  # norms subtract the mean
    is_parallel: bool = False  # the MLP reads what attention reads, and both are added to it at once
    activation: str = ""  # "gelu_tanh" or "clamped_swiglu"; "": silu
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None  # then head_dim is half a latent vector, and num_kv_heads is 1
    embed_scale: float = 0.0
    residual_scale: float = 0.0
    logits_divisor: float = 0.0
    logits_softcap: float = 0.0
    attention_scale: float = 0.0  # the factor of scores; 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0
    attention_sinks: bool = False
    windows: tuple[int, ...] = ()  # the number of tokens that each layer sees; 0: all
    local_rope: Rope | None = None  # the Rope of `local_layers`
    local_layers: frozenset[int] = frozenset()
    rotary_dim: int = 0  # how many of a head's numbers are rotated; 0: all
    rope_interleaved: bool = False
    layers_without_rope: frozenset[int] = frozenset()

    @property
    def multiplications(self) -> int:
        """The multiplications of one token with all layers' weights, without attention scores, embedding and head."""
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
