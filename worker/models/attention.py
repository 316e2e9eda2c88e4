"""Attention: each row attends to the keys and values of the rows before it, which are in the cache."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.checkpoint.stored_weight import PlainWeight, StackedLinear
from worker.models.cpu_decoder import AttentionC
from worker.models.layer_kinds import (
    LayerContext,
    LayerNames,
    Mixer,
    Place,
    SmallWeight,
    StoredPart,
    norm,
    norm_weights,
)
from worker.ops import paged_kv
from worker.ops.linear.packed import PackedLinear
from worker.ops.native import MAX_HEAD_DIM, MAX_KEY_ELEMENTS
from worker.spec import LayerSpec, ModelSpec

MODULE = "self_attn."
Q, K, V, FUSED, GATE = (f"{MODULE}{name}_proj" for name in ("q", "k", "v", "qkv", "gate"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """The weights of attention. H: hidden size; D: head_dim. Comments begin with the names in checkpoints."""

    kind: ClassVar[str] = "attention"
    qkv: PackedLinear  # q_proj, k_proj, v_proj: H → query, key and value heads; only query heads with shared K/V
    gates: PackedLinear | None = None  # half of q_proj, or gate_proj: H → query heads
    o: PackedLinear  # o_proj: query heads → H
    q_norm: Tensor | None = None  # q_norm [D], or [query heads * D] if one norm covers all heads
    k_norm: Tensor | None = None  # k_norm [D], or [key heads * D] if one norm covers all heads
    v_norm: Tensor | None = None  # ones [D], if values are divided by their root mean square
    sinks: Tensor | None = None  # sinks [query heads] float32: logits of an additional key whose value is zero

    @property
    def linears(self) -> Iterator[PackedLinear]:
        yield from (linear for linear in (self.qkv, self.gates, self.o) if linear is not None)


def forward(h: Tensor, own: AttentionWeights, index: int, step: LayerContext, next_weights: Sequence[Tensor]) -> Tensor:
    """Writes the K/V of all rows, and returns the mixed rows [T, query heads * D]; see Mixer.forward."""
    do, spec, inputs, kind, kv = step.do, step.spec, step.inputs, step.spec.layers[index], step.cache.layer(index)
    group = step.cache.group_of[index]
    gate = None if own.gates is None else do.linear(h, own.gates)
    shares = kind.shares is not None  # if true, the layer has query heads only
    written, k_norm = ([part[:, :, :0] for part in kv], own.q_norm) if shares else (kv, own.k_norm)
    k_centre = step.key_centres[index] if paged_kv.keys_are_rotated(kv[0]) else None
    q = do.qkv_rope_write(
        do.linear(h, own.qkv, split_k=True), *written, *step.ropes[kind.rope],
        inputs.positions if inputs.rope_rows is None else inputs.rope_rows,
        inputs.slot_mappings[group], q_norm=own.q_norm, k_norm=k_norm, v_norm=own.v_norm, k_centre=k_centre,
        eps=spec.norm_eps, offset=spec.norm_offset, dtype=h.dtype, norm_last=spec.qk_norm_last,
    )  # fmt: skip
    if step.query_scales is not None:
        q = (q.float() * step.query_scales[inputs.positions, None, None]).to(q.dtype)
    mixed = do.attention(
        q, *kv, inputs.query_start_loc, inputs.seq_lens, inputs.page_tables[group], inputs.max_kv_len,
        scale=spec.attention_scale, window=kind.window, sinks=own.sinks, softcap=spec.attention_softcap,
        next_weights=next_weights, bidirectional_end=inputs.bidirectional_end if kind.bidirectional else None,
    )  # fmt: skip
    return mixed.flatten(1) if gate is None else do.output_gate(mixed.flatten(1), gate)


def _linears(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    kv_heads, head_dim = spec.kv_shape(layer)
    q, kv = spec.heads * head_dim, kv_heads * head_dim
    hidden, order = layer.mixes or spec.hidden_size, _row_order(spec, layer)
    if layer.shares is not None:
        qkv = StackedLinear((Q,), (q,), hidden, spec.qkv_bias)
    elif layer.key_is_value:
        qkv = StackedLinear((Q, K, K), (q, kv, kv), hidden, spec.qkv_bias)
    elif _has_gate_in_queries(spec):
        qkv = StackedLinear((Q, K, V), (2 * q, kv, kv), hidden, spec.qkv_bias, order, apart=q)
    elif FUSED in names.modules:
        qkv = StackedLinear((FUSED,), (q + 2 * kv,), hidden, spec.qkv_bias, order)
    else:
        qkv = StackedLinear((Q, K, V), (q, kv, kv), hidden, spec.qkv_bias, order)
    o = StackedLinear((f"{MODULE}o_proj",), (spec.hidden_size,), q, spec.o_bias)
    gates = {"gates": StackedLinear((GATE,), (q,), hidden, False)} if spec.separate_gate else {}
    return {"qkv": qkv, "o": o, **gates}


def _small(spec: ModelSpec, layer: LayerSpec, names: LayerNames, prefix: str) -> dict[str, SmallWeight]:
    found = {}
    if spec.qk_norm:
        kv_heads, head_dim = spec.kv_shape(layer)
        heads = {"q_norm": spec.heads, "k_norm": kv_heads} if layer.shares is None else {"q_norm": spec.heads}
        for field, count in heads.items():
            size = (count if spec.whole_qk_norm else 1) * head_dim
            found[field] = SmallWeight(norm_weights(spec, prefix + names.spelled(MODULE + field), size))
    if spec.sinks:
        found["sinks"] = SmallWeight([PlainWeight(f"{prefix}{MODULE}sinks", (spec.heads,))], exact=True)
    return found


def _make(
    spec: ModelSpec, layer: LayerSpec, packed: Mapping[str, Any], small: Mapping[str, list[Tensor]], like: Tensor
) -> AttentionWeights:
    norms: dict[str, Any] = {
        field: _head_norm(spec, layer, parts) for field, parts in small.items() if field != "sinks"
    }  # fmt: skip
    if spec.value_norm and layer.shares is None:
        norms["v_norm"] = like.new_ones(spec.kv_shape(layer)[1])
    return AttentionWeights(**packed, **norms, sinks=small["sinks"][0] if "sinks" in small else None)


def _head_norm(spec: ModelSpec, layer: LayerSpec, parts: list[Tensor]) -> Tensor:
    """Returns a norm of queries or keys, with the dimensions of each head in memory order (see _head_order)."""
    order = None if spec.layer_norm else _head_order(spec, layer)
    if order is None:
        return norm(spec, parts)
    return parts[0].view(-1, spec.head_dim)[:, order.to(parts[0].device)].flatten()


def _unread(layer: LayerSpec) -> tuple[str, ...]:
    """Names the key and value projections of a layer that reads another layer's K/V: some checkpoints hold them."""
    shares = ("k_proj.", "v_proj.", "k_norm.", "v_norm.") if layer.shares is not None else ()
    return tuple(MODULE + module for module in shares)


def _has_gate_in_queries(spec: ModelSpec) -> bool:
    """Returns whether checkpoints store the linear of the output gates as rows of the query projection."""
    return spec.attention_gate and not spec.separate_gate


def _row_order(spec: ModelSpec, layer: LayerSpec) -> Tensor | None:
    """Returns the order of the rows of queries, gates, keys and values in memory; None: as in the checkpoint.

    With output gates, most checkpoints store each query head's rows and then the gate's rows of this head.
    """
    head, size, gated = _head_order(spec, layer), spec.head_dim, _has_gate_in_queries(spec)
    if head is None and not gated:
        return None
    plain = torch.arange(size)
    head = plain if head is None else head
    step = (1 + gated) * size
    queries, keys = torch.arange(spec.heads)[:, None] * step, torch.arange(spec.kv_heads)[:, None] * size
    gates = queries + size + plain if gated else queries[:0]
    first = spec.heads * step
    parts = (queries + head, gates, first + keys + head, first + spec.kv_heads * size + keys + plain)
    return torch.cat([part.flatten() for part in parts])


def _head_order(spec: ModelSpec, layer: LayerSpec) -> Tensor | None:
    """Returns the order of the dimensions of a query or key head in memory; None: as in the checkpoint.

    The kernels rotate dimension i of a head together with dimension i + D / 2. A checkpoint may rotate only the first R
    of the D dimensions, and may pair dimension i with i + R / 2, or adjacent dimensions. The order in memory places the
    dimensions of a pair D / 2 apart, and the unrotated dimensions between them.
    """
    rope, size = spec.ropes[layer.rope], spec.head_dim
    if not rope.rotated and not rope.neighbours:
        return None
    rotated = rope.rotated or size
    gap = (size - rotated) // 2
    pairs = torch.arange(rotated).view(-1, 2).T if rope.neighbours else torch.arange(rotated).view(2, -1)
    rest = torch.arange(rotated, size)
    return torch.cat((pairs[0], rest[:gap], pairs[1], rest[gap:]))


def _check(spec: ModelSpec, layer: LayerSpec) -> None:
    kv_heads, head_dim = spec.kv_shape(layer)
    if spec.heads % kv_heads:
        raise UnsupportedModel(
            f"num_key_value_heads {kv_heads} is not supported: it must divide num_attention_heads {spec.heads}"
        )
    if not 2 <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
        raise UnsupportedModel(
            f"head_dim {head_dim} is not supported; supported are even numbers from 2 to {MAX_HEAD_DIM}"
        )
    if kv_heads * head_dim > MAX_KEY_ELEMENTS:
        raise UnsupportedModel(
            f"num_key_value_heads {kv_heads} of head_dim {head_dim} are not supported: the keys of a token have at "
            f"most {MAX_KEY_ELEMENTS} elements"
        )


def _runs_in_c(place: Place) -> bool:
    return paged_kv.supports_cache(place.dtype, place.cache.layer(place.index)[0], place.spec.kv_shape(place.layer)[1])


def _in_c(own: AttentionWeights, place: Place) -> dict[str, Any]:
    layer, cache = place.layer, place.cache
    (cos, sin), (cache_k, cache_v) = place.ropes[layer.rope], cache.layer(place.index)
    attention = AttentionC(
        q_norm=own.q_norm, k_norm=own.k_norm, v_norm=own.v_norm,
        k_centre=place.key_centre if paged_kv.keys_are_rotated(cache_k) else None, cos=cos, sin=sin, sinks=own.sinks,
        cache_k=cache_k, cache_v=cache_v, norm_last=place.spec.qk_norm_last, window=layer.window,
        group=cache.group_of[place.index], shares=layer.shares is not None, bidirectional=layer.bidirectional,
    )  # fmt: skip
    return {"qkv": own.qkv.cpu, "gates": own.gates and own.gates.cpu, "o": own.o.cpu, "attention": attention}


def _key_bias(own: AttentionWeights, spec: ModelSpec, layer: LayerSpec) -> Tensor | None:
    bias = own.qkv.whole_bias
    if bias is None or layer.shares is not None:
        return None
    kv_heads, head_dim = spec.kv_shape(layer)
    size = kv_heads * head_dim
    return bias[-2 * size : -size].view(kv_heads, head_dim)


MIXER = Mixer(
    check=_check,
    stored=StoredPart(weights=AttentionWeights, linears=_linears, small=_small, make=_make, unread=_unread),
    forward=forward,
    runs_in_c=_runs_in_c,
    in_c=_in_c,
    key_bias=_key_bias,
)
