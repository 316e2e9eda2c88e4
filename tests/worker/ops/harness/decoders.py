"""Small decoders with random weights."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from tests.worker.ops.harness.cases import random
from worker.models.attention import AttentionWeights
from worker.models.decoder import Decoder, Layer, Weights
from worker.models.forward_inputs import ForwardInputs
from worker.models.mlp import DenseWeights
from worker.ops.embedding import Embedding, plain
from worker.ops.linear.packed import PackedLinear
from worker.spec import LayerSpec, ModelSpec, RopeSpec

PLAIN = ModelSpec(
    model_type="llama", vocab_size=70, hidden_size=256, intermediate_size=576, heads=8, kv_heads=2, head_dim=64,
    layers=(LayerSpec(0, 0),), ropes=(RopeSpec("default", 10_000.0),), max_positions=64, norm_eps=1e-6,
    attention_scale=0.125, activation="silu", tied=False, eos_ids=(), dtype="float32",
)  # fmt: skip


SANDWICH = replace(
    PLAIN,
    layers=2 * PLAIN.layers,
    norm_offset=True,
    post_norms=True,
    qk_norm=True,
    activation="gelu_tanh",
    embed_scale=4.0,
)


# layer norms, attention beside a feed-forward without a gate, and norms of queries and keys after the rotation
PARALLEL = replace(
    PLAIN, layers=2 * PLAIN.layers, layer_norm=True, norm_bias=True, parallel=True, gated=False, activation="relu2",
    qk_norm=True, qk_norm_last=True,
)  # fmt: skip


def weight(*shape: int, seed: int) -> Tensor:
    return random(*shape, seed=seed) / shape[-1] ** 0.5 if len(shape) > 1 else random(*shape, seed=seed)


def norm_shape(spec: ModelSpec) -> tuple[int, ...]:
    return (2, spec.hidden_size) if spec.layer_norm else (spec.hidden_size,)


def layer(spec: ModelSpec, seed: int) -> Layer:
    hidden, inner, d = spec.hidden_size, spec.intermediate_size, spec.head_dim
    shapes = {"qkv": (spec.qkv_size, hidden), "o": (hidden, spec.heads * d), "down": (hidden, inner),
              "gate_up": ((1 + spec.gated) * inner, hidden)}  # fmt: skip
    whole = norm_shape(spec)
    norms = {"before_attention": whole} | ({} if spec.parallel else {"before_mlp": whole})
    norms |= {"after_attention": whole, "after_mlp": whole} if spec.post_norms else {}
    heads = {"q_norm": (d,), "k_norm": (d,)} if spec.qk_norm else {}
    fields: dict[str, Any] = {
        name: random(*shape, seed=seed + i) for i, (name, shape) in enumerate((norms | heads).items())
    }
    for i, (name, shape) in enumerate(shapes.items()):
        fields[name] = PackedLinear(weight(*shape, seed=seed + 10 + i), None, True)
    attention = AttentionWeights(**{name: fields[name] for name in ("qkv", "o", *heads)})
    mlp = DenseWeights(gate_up=fields["gate_up"], down=fields["down"])
    return Layer(mixer=attention, feed_forward=mlp, **{name: fields[name] for name in norms})


def decoder_of(spec: ModelSpec, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    head = PackedLinear(weight(spec.vocab_size, spec.hidden_size, seed=1), None, True)
    layers = [layer(spec, 100 * i) for i in range(len(spec.layers))]
    embed = random(spec.vocab_size, spec.hidden_size, seed=2)
    whole = Weights(plain(embed), layers, random(*norm_shape(spec), seed=3), head)
    return Decoder(spec, moved(whole, device, dtype), 64)


def moved(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Returns a copy of a dataclass or list of tensors on another device. Tensors in float32 become `dtype`."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.dtype == torch.float32 else value.dtype)
    if isinstance(value, Embedding):
        return plain(moved(value.table(), device, dtype))
    if isinstance(value, list):
        return [moved(one, device, dtype) for one in value]
    if isinstance(value, Weights | Layer | AttentionWeights | DenseWeights | PackedLinear | ForwardInputs):
        return replace(value, **{f.name: moved(getattr(value, f.name), device, dtype) for f in fields(value)})
    return value
