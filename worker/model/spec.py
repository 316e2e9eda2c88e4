"""What a decoder-only model is, as data: sizes, which norms and biases exist, how each layer looks around.

It knows nothing of files (weights.py), of Hugging Face's names for these things (families.py), or of tensors.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One table of rotary angles; see rope.py for what each kind does with the numbers."""

    kind: str  # default, linear, llama3, yarn
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    original_positions: int = 0  # llama3, yarn: positions the model saw before it was stretched
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: correction range in whole dimensions
    magnitude: float = 1.0  # yarn: cos and sin are multiplied by it


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer."""

    window: int  # a row attends to the last `window` positions, its own included; 0: to all
    rope: int  # index into ModelSpec.ropes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A family and its sizes. Every layer has a norm before attention and one before the feed-forward."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    max_positions: int  # what the model was made for
    norm_eps: float
    norm_offset: bool = False  # norms multiply by 1 + w
    sandwich_norms: bool = False  # norms after attention and after the feed-forward, before the residual sum
    qk_norm: bool = False  # norms over head_dim on queries and keys, before the rotation
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float
    activation: Activation
    embed_scale: float = 1.0  # rounded to the weights' dtype before it is applied
    logit_softcap: float = 0.0  # c * tanh(logits / c); 0: none
    tied: bool  # the head is the embedding
    eos_ids: tuple[int, ...]
    dtype: str  # the checkpoint's: float32, bfloat16, float16

    @property
    def qkv_size(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim
