"""What a step must move and compute at least, from a model's sizes alone. Bytes and floating-point operations."""

from collections.abc import Sequence

from worker.model.spec import ModelSpec


def linear_parameters(spec: ModelSpec) -> int:
    """Of all layers' projections."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return len(spec.layers) * hidden * (spec.qkv_size + spec.heads * spec.head_dim + 3 * inner)


def head_parameters(spec: ModelSpec) -> int:
    return spec.vocab_size * spec.hidden_size


def weight_bytes(spec: ModelSpec, linear_size: float = 2, head_size: float = 2) -> float:
    """Read in every step: projections and head, once each; of the embedding only the rows that are looked up."""
    return linear_parameters(spec) * linear_size + head_parameters(spec) * head_size


def kv_bytes(spec: ModelSpec, contexts: Sequence[int], size: float = 2) -> float:
    """Keys and values that one decode of each sequence reads; `contexts` are tokens, windowed layers see fewer."""
    a_token = 2 * spec.kv_heads * spec.head_dim * size
    return a_token * sum(min(n, layer.window or n) for layer in spec.layers for n in contexts)


def prefill_operations(spec: ModelSpec, tokens: int) -> float:
    """Of a prompt computed alone: every projection, the attended pairs, the head for one row."""
    pairs = sum(_pairs(tokens, layer.window) for layer in spec.layers)
    attention = 4 * spec.heads * spec.head_dim * pairs
    return 2.0 * linear_parameters(spec) * tokens + attention + 2.0 * head_parameters(spec)


def attention_operations(heads: int, head_dim: int, tokens: int) -> float:
    """Causal, over itself."""
    return 4.0 * heads * head_dim * _pairs(tokens, 0)


def _pairs(tokens: int, window: int) -> float:
    """How many (query, key) a causal layer has."""
    reach = min(window or tokens, tokens)
    return reach * (reach + 1) / 2 + (tokens - reach) * reach
