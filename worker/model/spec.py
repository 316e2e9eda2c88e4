"""Describes a decoder-only model as data: its sizes, which norms and biases it has, and what each layer attends to.

The spec contains no files (see weights.py), no names of Hugging Face (see families.py) and no tensors.
"""

from dataclasses import dataclass
from typing import Literal

from worker.kernels.act_and_mul import Activation
from worker.kernels.quantize import Kind

Activations = Literal["unquantized", "dynamic", "other"]  # dynamic: quantized at run time, with a scale per token


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Describes one table of rotary embeddings. rope.py shows how each kind uses the numbers."""

    kind: str  # default, linear, llama3, yarn, longrope; none: nothing is rotated
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    original_positions: int = 0  # llama3, yarn: positions before the model was extended
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whether the ends of the ramp are rounded to whole dimensions
    magnitude: float = 1.0  # yarn, longrope: cos and sin are multiplied by it
    factors: tuple[float, ...] = ()  # longrope: one factor for each pair of dimensions
    rotated: int = 0  # how many dimensions of a head are rotated, 0 for all; weights.py reorders them


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The properties in which layers differ."""

    window: int  # a row attends to the last `window` positions, including its own; if 0, to all
    rope: int  # index into ModelSpec.ropes


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Describes how a checkpoint stores quantized linears. A linear is quantized if its tensors include scales."""

    kind: Kind
    block: tuple[int, int]  # how many rows and how many columns share a scale; 0 means all
    packed: bool = False  # four values in an int32
    activations: Activations = "unquantized"

    @property
    def by_row(self) -> bool:
        """Whether all columns share a scale, so that each row has only one; several rows may share it, too."""
        return self.block[1] == 0

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how many scales a weight of this shape has along its rows and along its columns."""
        rows, columns = (-(-size // step) if step else 1 for size, step in zip(shape, self.block, strict=True))
        return rows, columns

    def __str__(self) -> str:
        shared = {(0, 0): "a tensor", (1, 0): "a row"}.get(self.block, f"{self.block[0]} x {self.block[1]} values")
        return f"{self.kind}, one scale for {shared}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Describes a model. Every layer has a norm before attention and one before the feed-forward."""

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
    norm_offset: bool = False  # norms multiply by 1 + w
    sandwich_norms: bool = False  # norms after attention and after the feed-forward, before the residual sum
    qk_norm: bool = False  # norms over head_dim on queries and keys, before the rotation
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False  # whether the checkpoint stores q, k and v as one tensor, and gate and up as another
    attention_scale: float
    activation: Activation
    embed_scale: float = 1.0  # rounded to the weights' dtype before it is applied
    logit_softcap: float = 0.0  # if c is not 0, logits become c * tanh(logits / c)
    tied: bool  # whether the head is the embedding
    eos_ids: tuple[int, ...]
    dtype: str  # the dtype of the checkpoint: float32, bfloat16 or float16
    stored: StoredQuantization | None = None  # how eight-bit linears are stored; None if no linear is quantized

    @property
    def qkv_size(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim
