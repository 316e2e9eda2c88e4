"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in absorbed form: a token is cached as one short row.

A token's row is c, from which the keys and values of all heads can be made, and k, the rotated part of every key. With
the matrices U and V of a head, its key is (U c, k) and its value is V c. The score of a query (q, r) is therefore
q·U c + r·k = (Uᵀ q)·c + r·k. So the query (Uᵀ q, r) attends to the rows themselves, as if all query heads shared one
key head whose values are its keys, and V is applied to the sum of the rows. U and V are never applied to the cached
rows. A prompt's tokens are computed in the same way as later tokens, because both must have the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.checkpoint.checkpoint import UnsupportedModel
from worker.checkpoint.stored_weight import PlainWeight, StackedLinear
from worker.models.cpu_decoder import AttentionC, LatentC
from worker.models.layer_kinds import LayerContext, LayerNames, Mixer, Place, SmallWeight, StoredPart
from worker.ops import paged_kv
from worker.ops.linear.packed import PackedLinear
from worker.ops.moe.packed import PackedExperts
from worker.ops.native import MAX_HEAD_DIM
from worker.spec import LatentSpec, LayerSpec, ModelSpec

MODULE = "self_attn."
Q, Q_A, Q_B, KV_A, KV_B = (
    f"{MODULE}{name}" for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
)
# GGUF files may have kv_b_proj in two parts: for each head the rows that make keys, transposed, and those for values.
K_B, V_B = f"{MODULE}k_b_proj", f"{MODULE}v_b_proj"
EPS = 1e-6  # of the norms of c and of the queries' rank; configs state only that of other norms


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """The weights of latent attention. H: hidden size. Other sizes are those of LatentSpec. Comments begin with the
    names in checkpoints.
    """

    kind: ClassVar[str] = "latent"
    q_a: PackedLinear | None = None  # q_a_proj: H → query_rank; None: queries are made of the hidden state
    q_a_norm: Tensor | None = None  # q_a_layernorm [query_rank]
    q: PackedLinear  # q_b_proj: query_rank → heads * query, or q_proj: H → heads * query; in the order of _pairs_apart
    kv_a: PackedLinear  # kv_a_proj_with_mqa: H → row: c, then the rotated part, in the order of _pairs_apart
    kv_a_norm: Tensor  # kv_a_layernorm [rank]: the norm of c
    absorb: PackedExperts  # rows of kv_b_proj that make keys, transposed: for each head plain → rank
    expand: PackedExperts  # rows of kv_b_proj that make values: for each head rank → value
    o: PackedLinear  # o_proj: heads * value → H

    @property
    def linears(self) -> Iterator[PackedLinear | PackedExperts]:
        yield from (one for one in (self.q_a, self.q, self.kv_a, self.absorb, self.expand, self.o) if one is not None)


def forward(h: Tensor, own: LatentWeights, index: int, step: LayerContext, next_weights: Sequence[Tensor]) -> Tensor:
    do, spec, inputs, kind = step.do, step.spec, step.inputs, step.spec.layers[index]
    of, (cache, _), group = latent_of(spec), step.cache.layer(index), step.cache.group_of[index]
    queries = do.linear(h if own.q_a is None else _query_rank(h, own, step), own.q).view(len(h), -1, of.query)
    absorbed = do.linear_per_head(queries[:, :, : of.plain], own.absorb)
    row = do.linear(h, own.kv_a)
    c = do.rms_norm(row[:, : of.rank].contiguous(), own.kv_a_norm, EPS, offset=False)
    key, every = row_of(c, row[:, of.rank :]), row_of(absorbed, queries[:, :, of.plain :])
    q = do.qkv_rope_write(
        torch.cat((every.flatten(1), key), dim=1), cache, None,
        *step.ropes[kind.rope], inputs.positions, inputs.slot_mappings[group],
        q_norm=None, k_norm=None, v_norm=None, eps=EPS, offset=False, dtype=h.dtype,
    )  # fmt: skip
    if step.query_scales is not None:
        q = (q.float() * step.query_scales[inputs.positions, None, None]).to(q.dtype)
    mixed = do.attention(
        q, cache, cache, inputs.query_start_loc, inputs.seq_lens, inputs.page_tables[group], inputs.max_kv_len,
        scale=spec.attention_scale, window=kind.window, sinks=None, softcap=0.0, next_weights=next_weights,
    )  # fmt: skip
    return do.linear_per_head(c_of(mixed, of.rank), own.expand).flatten(1)


def _query_rank(h: Tensor, own: LatentWeights, step: LayerContext) -> Tensor:
    """Returns the normed numbers that queries are made of, [T, query_rank]."""
    assert own.q_a is not None and own.q_a_norm is not None
    return step.do.rms_norm(step.do.linear(h, own.q_a), own.q_a_norm, EPS, offset=False)


def latent_of(spec: ModelSpec) -> LatentSpec:
    assert spec.latent is not None
    return spec.latent


def row_of(c: Tensor, rotated: Tensor) -> Tensor:
    """Returns rows [..., rank + rope] as they are cached, of c [..., rank] and the rotated part [..., rope].

    The kernels rotate dimension i together with dimension i + row / 2. So each half of a row begins with one dimension
    of every pair, and the halves of `rotated` have these dimensions.
    """
    (first, second), (low, high) = rotated.chunk(2, dim=-1), c.chunk(2, dim=-1)
    return torch.cat((first, low, second, high), dim=-1)


def c_of(rows: Tensor, rank: int) -> Tensor:
    """Returns c [..., rank] of rows as row_of makes them."""
    return torch.cat([half[..., half.shape[-1] - rank // 2 :] for half in rows.chunk(2, dim=-1)], dim=-1)


def _pairs_apart(spec: ModelSpec, rows: int, plain: int) -> Tensor:
    """Returns the order of `rows` rows of a linear in memory. The last `rope` of each `plain` + rope rows are rotated;
    in the order, they begin with the first dimension of every pair.
    """
    size = plain + latent_of(spec).rope
    own = torch.cat((torch.arange(plain), plain + _pairs(spec).flatten()))
    return (torch.arange(0, rows, size)[:, None] + own).flatten()


def _pairs(spec: ModelSpec) -> Tensor:
    """Returns the dimensions of the rotated part that form pairs, [2, rope / 2]."""
    dims = torch.arange(latent_of(spec).rope)
    return dims.view(-1, 2).T if spec.ropes[0].neighbours else dims.view(2, -1)


def _linears(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    of, hidden, bias = latent_of(spec), spec.hidden_size, spec.qkv_bias
    found = {}
    if of.query_rank:
        found["q_a"] = StackedLinear((Q_A,), (of.query_rank,), hidden, bias)
    order = _pairs_apart(spec, spec.heads * of.query, of.plain)
    name, inputs = (Q_B, of.query_rank) if of.query_rank else (Q, hidden)
    found["q"] = StackedLinear((name,), (len(order),), inputs, False, order)
    found["kv_a"] = StackedLinear((KV_A,), (of.row,), hidden, bias, _pairs_apart(spec, of.row, of.rank))
    found["o"] = StackedLinear((f"{MODULE}o_proj",), (hidden,), spec.heads * of.value, spec.o_bias)
    return found


def _small(spec: ModelSpec, layer: LayerSpec, names: LayerNames, prefix: str) -> dict[str, SmallWeight]:
    of = latent_of(spec)
    sizes = {"kv_a_norm": ("kv_a_layernorm", of.rank), "q_a_norm": ("q_a_layernorm", of.query_rank)}
    return {
        field: SmallWeight([PlainWeight(f"{prefix}{MODULE}{module}.weight", (size,))])
        for field, (module, size) in sizes.items()
        if size
    }


def _unpacked(spec: ModelSpec, layer: LayerSpec, names: LayerNames) -> dict[str, StackedLinear]:
    of, heads = latent_of(spec), spec.heads
    if K_B in names.modules:
        return {
            "k_b": StackedLinear((K_B,), (heads * of.rank,), of.plain, False, exact=True),
            "v_b": StackedLinear((V_B,), (heads * of.value,), of.rank, False, exact=True),
        }
    return {"kv_b": StackedLinear((KV_B,), (heads * (of.plain + of.value),), of.rank, False, exact=True)}


def _derived(spec: ModelSpec, layer: LayerSpec, read: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    of = latent_of(spec)
    if "k_b" in read:
        return {
            "absorb": [*read["k_b"].view(-1, of.rank, of.plain)],
            "expand": [*read["v_b"].view(-1, of.value, of.rank)],
        }
    heads = read["kv_b"].view(-1, of.plain + of.value, of.rank)
    return {
        "absorb": [one[: of.plain].T.contiguous() for one in heads],
        "expand": [one[of.plain :].contiguous() for one in heads],
    }


def _unread(layer: LayerSpec) -> tuple[str, ...]:
    """Names kv_b_proj, which a file may hold besides its two parts."""
    return (f"{KV_B}.",)


def _make(
    spec: ModelSpec, layer: LayerSpec, packed: Mapping[str, Any], small: Mapping[str, list[Tensor]], like: Tensor
) -> LatentWeights:
    norms: dict[str, Any] = {field: one for field, (one,) in small.items()}
    return LatentWeights(**packed, **norms)


def _check(spec: ModelSpec, layer: LayerSpec) -> None:
    of = latent_of(spec)
    if of.rank % 2 or of.rope % 2:
        raise UnsupportedModel(
            f"kv_lora_rank {of.rank} with qk_rope_head_dim {of.rope} is not supported: both must be even"
        )
    if of.row > MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"kv_lora_rank {of.rank} with qk_rope_head_dim {of.rope} is not supported: together they are at most "
            f"{MAX_HEAD_DIM}"
        )


def _runs_in_c(place: Place) -> bool:
    return paged_kv.supports_cache(place.dtype, place.cache.layer(place.index)[0], latent_of(place.spec).row)


def _in_c(own: LatentWeights, place: Place) -> dict[str, Any]:
    (cos, sin), (cache_k, cache_v) = place.ropes[place.layer.rope], place.cache.layer(place.index)
    attention = AttentionC(
        q_norm=None, k_norm=None, v_norm=None, k_centre=None, cos=cos, sin=sin, sinks=None, cache_k=cache_k,
        cache_v=cache_v, norm_last=False, window=place.layer.window, group=place.cache.group_of[place.index],
        shares=False, bidirectional=False,
    )  # fmt: skip
    assert own.absorb.cpu is not None and own.expand.cpu is not None
    latent = LatentC(
        q_b=own.q.cpu if own.q_a is not None else None, absorb=own.absorb.cpu, expand=own.expand.cpu,
        q_a_norm=own.q_a_norm, kv_a_norm=own.kv_a_norm, of=latent_of(place.spec), eps=EPS,
    )  # fmt: skip
    first = own.q if own.q_a is None else own.q_a
    return {"qkv": first.cpu, "gates": own.kv_a.cpu, "o": own.o.cpu, "attention": attention, "latent": latent}


MIXER = Mixer(
    check=_check,
    stored=StoredPart(
        weights=LatentWeights,
        linears=_linears,
        small=_small,
        unpacked=_unpacked,
        derived=_derived,
        make=_make,
        unread=_unread,
    ),
    forward=forward,
    runs_in_c=_runs_in_c,
    in_c=_in_c,
)
