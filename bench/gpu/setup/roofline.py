"""Computes, from a model's sizes, the minimum numbers of bytes and floating-point operations that a step needs."""

from collections.abc import Sequence

from worker.spec import LayerSpec, ModelSpec


def linear_parameters(spec: ModelSpec, rows: int | None = None) -> float:
    """Returns the number of parameters in the projections of all layers.

    rows: if given, only experts that this number of rows chooses are counted: their expected number, if each row
    chooses every expert with the same probability.
    """
    attention = spec.hidden_size * (spec.qkv_size + spec.heads * spec.head_dim)
    return sum(attention + _feed_forward_parameters(spec, layer, rows) for layer in spec.layers)


def _feed_forward_parameters(spec: ModelSpec, layer: LayerSpec, rows: int | None) -> float:
    experts, of_inner = spec.experts, 3 * spec.hidden_size
    if experts is None or not layer.sparse:
        return of_inner * spec.intermediate_size
    shared_gate = spec.hidden_size if experts.shared_gated else 0
    of_experts = expert_parameters(spec, rows)
    return spec.hidden_size * experts.count + of_experts + of_inner * experts.shared_size + shared_gate


def expert_parameters(spec: ModelSpec, rows: int | None) -> float:
    """Returns the number of parameters of a layer's experts, without the router. rows: see linear_parameters."""
    experts = spec.experts
    assert experts is not None
    read = experts.count if rows is None else experts.count * (1 - (1 - experts.chosen / experts.count) ** rows)
    return 3 * spec.hidden_size * read * experts.intermediate_size


def used_parameters(spec: ModelSpec) -> float:
    """Returns the number of projection parameters that one row is multiplied by."""
    return linear_parameters(spec, rows=1)


def head_parameters(spec: ModelSpec) -> int:
    return spec.vocab_size * spec.hidden_size


def weight_bytes(spec: ModelSpec, rows: int, linear_size: float = 2, head_size: float = 2) -> float:
    """Returns the bytes of weights that a step of `rows` rows reads. Each weight of projections and head is read once.

    Experts that no row chooses are not read (see linear_parameters). A step reads only a few rows of the embedding,
    which are not counted.
    """
    return linear_parameters(spec, rows) * linear_size + head_parameters(spec) * head_size


def kv_bytes(spec: ModelSpec, contexts: Sequence[int], size: float = 2) -> float:
    """Returns the K/V bytes that a decode step reads for all sequences together.

    A layer with a window reads only the K/V inside the window. contexts: tokens of each sequence. size: bytes of a
    value.
    """
    a_token = 2 * spec.kv_heads * spec.head_dim * size
    return a_token * sum(min(n, layer.window or n) for layer in spec.layers for n in contexts)


def prefill_operations(spec: ModelSpec, tokens: int) -> float:
    """Returns the operations of a prompt computed alone: all projections, all attended pairs, the head for one row."""
    pairs = sum(_pairs(tokens, layer.window) for layer in spec.layers)
    attention = 4 * spec.heads * spec.head_dim * pairs
    return 2.0 * used_parameters(spec) * tokens + attention + 2.0 * head_parameters(spec)


def attention_operations(heads: int, head_dim: int, tokens: int) -> float:
    """Returns the operations of causal attention of a prompt over its own tokens."""
    return 4.0 * heads * head_dim * _pairs(tokens, 0)


def _pairs(tokens: int, window: int) -> float:
    """Returns the number of query-key pairs of a causal layer. window: 0 if the layer has no window."""
    reach = min(window or tokens, tokens)
    return reach * (reach + 1) / 2 + (tokens - reach) * reach
