"""Describes a decoder-only model as data: its sizes, which norms and biases it has, and what each layer attends to.

The spec contains no file names (models/load.py), no Hugging Face names (models/config.py) and no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Activation = Literal["silu", "gelu_tanh", "relu2", "clamped_swiglu", "xielu", "gelu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)  # the C library knows activations by these positions


class RecurrentShape(Protocol):
    """The sizes of a kind of recurrent layer."""

    @property
    def tail(self) -> tuple[int, int]:
        """How many last inputs of its convolution a layer keeps, and their width."""

    @property
    def memory(self) -> int:
        """How many float32 numbers, with padding, a layer keeps in addition to the last inputs of its convolution."""


ATTENTION = "attention"  # the kind of mixer that keeps K/V
# dynamic: quantized at run time, with a scale per token; blocks: a format of llama.cpp, which rounds them in blocks
Activations = Literal["unquantized", "dynamic", "blocks", "other"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Describes one table of rotary embeddings. Comments name the kinds that use a field; worker/models/decoder.py
    shows how.
    """

    kind: str  # default, linear, proportional, llama3, yarn or longrope; none: no rotation
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0  # only of llama3
    high_freq_factor: float = 1.0  # only of llama3
    original_positions: int = 0  # llama3, yarn: the model's positions before its context was extended
    beta_fast: float = 32.0  # only of yarn
    beta_slow: float = 1.0  # only of yarn
    truncate: bool = True  # yarn: whether the ends of the ramp are rounded to whole dimensions
    magnitude: float = 1.0  # yarn, longrope: cos and sin are multiplied by this
    factors: tuple[float, ...] = ()  # longrope: one factor for each pair of dimensions
    rotated: int = 0  # how many dimensions of a head are rotated; 0: all
    neighbours: bool = False  # whether the checkpoint rotates pairs of adjacent dimensions, which are reordered on load
    pairs: int = 0  # proportional: only this many pairs of dimensions are rotated, by the angles as if all pairs were
    head_dim: int = 0  # the size of a head; 0: ModelSpec.head_dim


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties in which layers differ."""

    window: int  # a row attends to the last `window` positions, including its own; 0: to all positions
    rope: int  # index into ModelSpec.ropes
    sparse: bool = False  # whether the feed-forward has experts (ModelSpec.experts)
    bare: bool = False  # whether the layer has no feed-forward, only a mixer
    mixer: str = ATTENTION  # the kind of mixer: a name of MIXERS, worker/models/layer_kinds.py
    state: RecurrentShape | None = None  # the sizes of the layer's recurrent state; None: the layer has K/V instead
    kv_heads: int = 0  # 0: the same as ModelSpec.kv_heads
    head_dim: int = 0  # 0: the same as ModelSpec.head_dim
    intermediate_size: int = 0  # the width of the MLP; 0: ModelSpec.intermediate_size
    key_is_value: bool = False  # whether values are the projected keys, before their norm and rotation
    mixes: int = 0  # how many inputs the mixer's linears have; 0: ModelSpec.hidden_size
    bidirectional: bool = True  # whether an image's tokens attend to the image's later tokens, if the model allows this
    shares: int | None = None  # the index of the layer whose K/V this layer reads; None: it has its own K/V

    @property
    def feed_forward(self) -> str:
        """The kind of the feed-forward network: a name of FEED_FORWARDS, worker/models/layer_kinds.py."""
        return "none" if self.bare else "experts" if self.sparse else "dense"

    @property
    def recurrent(self) -> bool:
        """Whether the layer keeps a recurrent state instead of K/V."""
        return self.state is not None


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """A router that first chooses groups of experts, and then experts of these groups only (DeepSeek).

    A group's score is the sum of its `best` greatest scores. Groups have equally many experts with successive numbers.
    """

    count: int
    chosen: int  # how many groups are chosen for a row
    best: int  # 1 or 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Describes the mixture of experts of sparse layers: a router chooses experts for each row.

    The shared expert is an additional MLP that every row uses.
    """

    count: int
    chosen: int  # how many experts are chosen for a row
    intermediate_size: int
    normalized: bool  # whether the weights of a row's experts are divided by their sum
    sigmoid: bool = False  # whether the router's scores are the sigmoids of its logits; otherwise their softmax
    choice_bias: bool = False  # whether a bias per expert is added to the scores, only to choose the experts
    averaged: bool = False  # whether the output is the mean of the shared expert's output and of the sum of the others
    groups: ExpertGroups | None = None  # None: experts are chosen among all
    factor: float = 1.0  # the weights of the chosen experts are multiplied by this
    router_bias: bool = False
    bias: bool = False  # whether the linears of experts have biases
    shared_size: int = 0  # intermediate size of the shared expert; 0: there is no shared expert
    shared_gated: bool = False  # whether the shared expert's output is multiplied by sigmoid(a linear of the input)
    beside_mlp: bool = False  # whether sparse layers also have the MLP; both then have separate norms (Gemma 4)
    transposed: bool = False  # whether tensors of all experts may be stored as [E, inputs, outputs]


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Summarizes how a checkpoint stores quantized linears. worker/quantization has the details.

    kind: int8, fp8, int4 or another format; several formats are joined by "and"
    shared: which values share a scale: "a row", "128 values" and so on; "" if the kind determines it
    by_row: whether all quantized linears have eight bits and one scale per row, and neither zero points nor minimums
    """

    kind: str
    shared: str = ""
    by_row: bool = False
    activations: Activations = "unquantized"

    @classmethod
    def of_all(cls, parts: "Sequence[StoredQuantization]") -> "StoredQuantization":
        """Combines the summaries of parts of a checkpoint. If they differ, dynamic activations become "other"."""
        if len(set(parts)) == 1:
            return parts[0]
        kinds, shared = (list(dict.fromkeys(names)) for names in zip(*((p.kind, p.shared) for p in parts), strict=True))
        plain = all(part.activations == "unquantized" for part in parts)
        by_row = len(kinds) == 1 and all(part.by_row for part in parts)
        return cls(" and ".join(kinds), " or ".join(shared), by_row, "unquantized" if plain else "other")

    def __str__(self) -> str:
        return f"{self.kind}, one scale for {self.shared}" if self.shared else self.kind


@dataclass(frozen=True, slots=True)
class PerLayerInputsSpec:
    """Describes per-layer embeddings (Gemma 4 E2B, E4B): every layer has a vector for each token.

    The vector comes from an embedding table and from a linear of the token's embedding. The layer transforms it and
    adds it to the residual stream.
    """

    vocab_size: int
    size: int  # the size of a layer's vector


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Describes multi-head latent attention (DeepSeek), of which worker/models/latent.py says how it is computed.

    A token is cached as one row of `rank` + `rope` numbers, which all query heads share.
    """

    rank: int  # how many numbers keys (without their rotated part) and values are made of
    rope: int  # how many dimensions of a query or key are rotated
    plain: int  # how many dimensions of a query or key are not rotated
    value: int  # how many dimensions a value has
    query_rank: int = 0  # how many numbers queries are made of; 0: they are made of the hidden state

    @property
    def query(self) -> int:
        """How many dimensions a query has."""
        return self.plain + self.rope

    @property
    def row(self) -> int:
        """How many numbers are cached for a token."""
        return self.rank + self.rope


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta * log(1 + p // positions) (Llama 4, Ministral 3)."""

    beta: float
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Describes a decoder-only model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    max_positions: int  # how many positions the model was trained for
    norm_eps: float
    norm_offset: bool = False  # norms multiply by 1 + weight
    layer_norm: bool = False  # norms subtract the mean (worker/ops/norm/reference.py)
    norm_bias: bool = False  # norms have biases
    pre_norms: bool = True  # norms before attention and before the feed-forward
    post_norms: bool = False  # norms after attention and after the feed-forward, before the residual sum
    parallel: bool = False  # attention and feed-forward have the same input; both are added to the residual stream
    qk_norm: bool = False  # norms over head_dim on queries and keys, before the rotation
    qk_norm_last: bool = False  # with qk_norm: the norms follow the rotation
    whole_qk_norm: bool = False  # with qk_norm: one norm over all query heads, and one over all key heads
    value_norm: bool = False  # each value is divided by its root mean square
    layer_scales: bool = False  # each layer's output is multiplied by a learned number
    per_layer_inputs: PerLayerInputsSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False  # attention has one more key per query head, with a learned logit and a value of zero
    attention_gate: bool = False  # attention's output is multiplied by sigmoid(a linear of the input)
    separate_gate: bool = False  # with attention_gate: checkpoints store that linear apart from the query projection
    latent: LatentSpec | None = None  # None: no layer has latent attention; else all have, with kv_heads 1
    experts: ExpertsSpec | None = None
    attention_scale: float
    attention_softcap: float = 0.0  # if c is not 0, scaled scores become c * tanh(scores / c)
    activation: Activation
    gated: bool = True  # whether the feed-forward has a gate
    embed_scale: float = 1.0  # rounded to the weights' dtype before it is applied
    residual_scale: float = 1.0  # outputs of attention and feed-forward are multiplied by this before the residual sum
    query_scaling: QueryScaling | None = None
    logit_scale: float = 1.0  # logits are multiplied by this
    logit_softcap: float = 0.0  # if c is not 0, logits become c * tanh(logits / c)
    tied: bool  # whether the output head is the embedding
    draft_layers: int = 0  # how many layers for drafts the checkpoint has behind the model's last layer
    labels: int = 0  # rows of the classification head, which replaces the output head; 0: the model has none
    eos_ids: tuple[int, ...]
    dtype: str  # the dtype of the checkpoint: float32, bfloat16 or float16
    stored: StoredQuantization | None = None  # how quantized linears are stored; None if no linear is quantized

    @property
    def qkv_size(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def recurrent(self) -> bool:
        """Whether any layer has a recurrent state."""
        return any(layer.recurrent for layer in self.layers)

    @property
    def last_kept(self) -> int:
        """The index of the last layer with its own K/V or state. All later layers read the K/V of other layers."""
        return max(index for index, layer in enumerate(self.layers) if layer.shares is None)

    def kv_shape(self, layer: LayerSpec) -> tuple[int, int]:
        """Returns the number of a layer's K/V heads, and their size.

        Keys and values have the same shape, because the kernels require it. A mixer whose keys and values differ in
        shape needs its own kernels, and two shapes in kv_cache/tensors.py.
        """
        return layer.kv_heads or self.kv_heads, layer.head_dim or self.head_dim

    @property
    def kv_tensors(self) -> int:
        """How many cached tensors a layer with K/V has: 2, or 1 if the rows of keys are the values, too."""
        return 2 if self.latent is None else 1
