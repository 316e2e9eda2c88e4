"""The decoder: one plain loop over the layers. The spec describes the model family; a norm that a family lacks is None.

The decoder works on rows and knows no sequences. The kernels read from ForwardInputs which positions each row may
attend to. layer_kinds.py lists the kinds of layers.
"""

import math
from collections.abc import Iterator
from copy import copy
from ctypes import c_uint64
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.kv_cache.tensors import KVCache
from worker.models.forward_inputs import ForwardInputs
from worker.models.layer_kinds import LayerContext, feed_forward, mixer
from worker.models.per_layer_embeddings import (
    PerLayerInput,
    PerLayerInputs,
    add_per_layer_input,
    add_vectors,
    vectors_of_layers,
    write_aux_hidden_states,
)
from worker.operations import FAST, Exchange, Operations, alone
from worker.ops.embedding import Embedding
from worker.ops.linear.packed import PackedLinear
from worker.ops.moe.packed import PackedExperts
from worker.spec import ModelSpec, QueryScaling, RopeSpec

# The weights of a model: each layer's mixer, feed-forward network and norms; the embedding, last norm and head.


class MixerWeights(Protocol):
    """The weights of a mixer. Each kind of mixer has a record of its own (layer_kinds.py)."""

    @property
    def kind(self) -> str: ...

    @property
    def o(self) -> PackedLinear:
        """The output projection: the linear that is applied to the mixer's result."""

    @property
    def linears(self) -> Iterator[PackedLinear]: ...


class FeedForwardWeights(Protocol):
    """The weights of a feed-forward network. Each kind of network has a record of its own (layer_kinds.py)."""

    @property
    def kind(self) -> str: ...

    @property
    def first(self) -> PackedLinear | None:
        """The linear that every row uses first; None if there is no such linear, as in a mixture of experts."""

    @property
    def linears(self) -> Iterator[PackedLinear | PackedExperts]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer. Norms are [H], or [2, H] if they are layer norms. None: the layer has no such weight.

    The comment of a field begins with the weight's name in Hugging Face checkpoints.
    """

    before_attention: Tensor | None = None  # input_layernorm
    mixer: MixerWeights
    after_attention: Tensor | None = None  # post_attention_layernorm of Gemma, before the residual sum
    before_mlp: Tensor | None = None  # post_attention_layernorm; Gemma: pre_feedforward_layernorm
    feed_forward: FeedForwardWeights
    after_mlp: Tensor | None = None  # post_feedforward_layernorm of Gemma, before the residual sum
    per_layer_input: PerLayerInput | None = None  # the weights that apply the per-layer embedding
    scale: Tensor | None = None  # layer_scalar [1]: the factor of the layer's output

    @property
    def next_weights(self) -> list[Tensor]:
        """The weights that are read directly after the mixer, in the order of reading."""
        first = self.feed_forward.first
        return [self.mixer.o.memory] if first is None else [self.mixer.o.memory, first.memory]

    @property
    def linears(self) -> Iterator[PackedLinear | PackedExperts]:
        """All linears of this layer."""
        yield from self.mixer.linears
        yield from self.feed_forward.linears
        if self.per_layer_input is not None:
            yield from (self.per_layer_input.gate, self.per_layer_input.out)


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, on one device."""

    embed: Embedding  # embed_tokens [vocab, H]
    layers: list[Layer]
    norm: Tensor  # norm [H]
    head: PackedLinear  # lm_head: H → vocab
    per_layer_inputs: PerLayerInputs | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes the embeddings and all linears take in memory."""
        linears = (linear for layer in self.layers for linear in layer.linears)
        inputs = 0 if self.per_layer_inputs is None else self.per_layer_inputs.nbytes
        return self.embed.nbytes + inputs + sum(linear.nbytes for linear in (*linears, self.head))


class Decoder:
    """A model that is ready to run. The state of sequences is in the cache, not in the decoder."""

    def __init__(self, spec: ModelSpec, weights: Weights, max_positions: int, operations: Operations = FAST) -> None:
        """max_positions: the rotary tables cover positions 0 .. max_positions - 1."""
        self.spec, self.weights, self.operations, self.max_positions = spec, weights, operations, max_positions
        self.exchange: Exchange = alone  # makes operations gather the columns of other ranks, if there are any
        self.layers_started = c_uint64()  # a count over all steps, which shows that a long step makes progress
        self.ropes = [tables(table, spec.head_dim, max_positions, weights.embed.device) for table in spec.ropes]
        self.query_scales = query_scales(spec.query_scaling, max_positions, weights.embed.device)
        self.key_centres = key_centres(spec, weights)
        self._forwards = [
            (mixer(layer.mixer.kind).forward, feed_forward(layer.feed_forward.kind).forward) for layer in weights.layers
        ]
        self.norms = [*(layer.before_attention for layer in weights.layers), weights.norm]
        # The scale is rounded to the weights' dtype, as in training: for example, sqrt(1152) is 34 in bfloat16.
        self.embed_scale = torch.tensor(spec.embed_scale).to(weights.embed.dtype).item()

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Writes the K/V of every row and returns the logits of inputs.logits_indices, [R, vocab] float32."""
        return self.logits(self.hidden(inputs, cache))

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Writes the K/V of every row and returns the final norm's output at inputs.logits_indices, [R, H]."""
        do, spec, last = self.exchange(self.operations), self.spec, len(self.weights.layers) - 1
        kept = spec.last_kept if inputs.few_logits else last
        eps, offset, scale = spec.norm_eps, spec.norm_offset, spec.residual_scale
        x = self.embedded(inputs)
        own = vectors_of_layers(self.weights.per_layer_inputs, inputs, x, eps, do)
        h = x if self.norms[0] is None else do.rms_norm(x, self.norms[0], eps, offset=offset)
        h = h if inputs.first is None else inputs.first
        ropes = at_columns(self.ropes, inputs.rotary)
        step = LayerContext(do, spec, ropes, self.query_scales, self.key_centres, inputs, cache)
        for index, (layer, (mix, feed)) in enumerate(zip(self.weights.layers, self._forwards, strict=True)):
            self.layers_started.value += 1
            normed, h = h, mix(h, layer.mixer, index, step, layer.next_weights)  # [T, width of the mixer]
            if index == kept:  # All K/V and states are written. From here on, only the rows with logits are computed.
                if not len(inputs.logits_indices):
                    return x[:0]
                if not inputs.all_logits:
                    h, x, normed = (rows[inputs.logits_indices] for rows in (h, x, normed))
                    own = None if own is None else own[inputs.logits_indices]
                if kept < last:
                    step = replace(step, inputs=inputs.only_logits())
            after, before = layer.after_attention, layer.before_mlp
            h, x = do.linear_add_norm(h, layer.mixer.o, x, before, eps, offset=offset, x_norm=after, scale=scale)
            h, down = feed(normed if spec.parallel else h, x, layer.feed_forward, step)
            before = self.norms[index + 1] if own is None and layer.scale is None else None
            h, x = do.maybe_linear_add_norm(h, down, x, before, eps, offset=offset, x_norm=layer.after_mlp, scale=scale)
            if own is not None and layer.per_layer_input is not None:
                h = x = add_per_layer_input(x, own[:, index], layer.per_layer_input, spec, do)
            if layer.scale is not None:
                h = x = x * layer.scale
            if index < len(inputs.added):
                add_vectors(h, x, inputs, index, self.norms[index + 1], do, spec)
            write_aux_hidden_states(x, inputs, index, all_rows=index < kept)
            if before is None and (weight := self.norms[index + 1]) is not None:
                h = do.rms_norm(x, weight, eps, offset=offset)
        return h

    def embedded(self, inputs: ForwardInputs) -> Tensor:
        """Returns the scaled embeddings of all rows, [T, H], or what replaces them."""
        x = self.weights.embed.rows(inputs.token_ids)
        x = x if self.embed_scale == 1.0 else x * self.embed_scale
        return x if inputs.replaced is None else x.index_copy(0, *inputs.replaced)

    def logits(self, h: Tensor) -> Tensor:
        """Computes the logits [R, vocab] float32. h: the normed output of the last layer [R, H]."""
        if not h.shape[0]:
            return h.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        logits = self.exchange(self.operations).whole_linear(h, self.weights.head, fp32_out=True)
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        cap = self.spec.logit_softcap
        return (logits / cap).tanh() * cap if cap else logits

    def count_replayed(self) -> None:
        """Counts the layers of a forward replayed from a CUDA graph, because a replay does not run forward()."""
        self.layers_started.value += len(self.weights.layers)

    def count_loads(self, loads: Tensor | None = None) -> Tensor:
        """Makes every step add the number of rows routed to each expert to `loads` [layers, E] int64. Returns `loads`.

        loads: None: a new tensor of zeros
        """
        layers, spec = self.weights.layers, self.spec.experts
        if loads is None:
            shape = (len(layers), 0 if spec is None else spec.count)
            loads = torch.zeros(shape, dtype=torch.int64, device=self.weights.embed.device)
        counting = [
            replace(layer, feed_forward=feed_forward(layer.feed_forward.kind).counting(layer.feed_forward, load))
            for layer, load in zip(layers, loads, strict=True)
        ]
        self.weights = replace(self.weights, layers=counting)
        return loads

    def with_operations(self, operations: Operations) -> "Decoder":
        """Returns a copy of this decoder with other operations. The copy shares the weights and `layers_started`."""
        other = copy(self)
        other.operations = operations
        return other


# Decides which models keep keys in int8 without their centre, and computes it.
#
# A key is the rotary embedding of a projection and its bias. Some biases are 40 times as long as the rest of a key
# (Qwen2.5), and a step of int8 follows the largest element. So the mean over positions of the rotated bias, the centre
# of a head's keys, is subtracted from each of them before it is rounded.
#
# Attention needs no change: subtracting a vector c from all keys of a head subtracts the same number q · c from all
# scores of a query q, and softmax depends only on differences of scores. So any centre gives correct results, up to
# rounding. How close it is to the keys decides only how much precision is gained; that depends on the kind of rotary
# embedding (partial, interleaved, YaRN, M-RoPE), on adapters of the projection, and on the positions of a text.

# The mean is over this many positions, whatever the length of the context is, so that the centre depends on the
# checkpoint alone. A mean over more positions loses what pairs that rotate slowly have in common in short texts.
CENTRE_POSITIONS = 8192


def centred_over(spec: ModelSpec) -> int:
    """Returns the number of positions over which centres are means; 0 if the model's keys have no centre.

    Keys have none
    - if a shift of all scores changes the result: with the logits of sinks (gpt-oss), or a soft cap (Gemma 2);
    - if keys are normed after the bias was added (Qwen3, Gemma 3), or there is no bias (Llama);
    - if the cached rows are both keys and values (latent attention).
    """
    shifted_is_same = not spec.sinks and spec.attention_softcap == 0.0
    return CENTRE_POSITIONS if shifted_is_same and spec.qkv_bias and not spec.qk_norm and spec.latent is None else 0


def key_centres(spec: ModelSpec, weights: Weights) -> list[Tensor | None]:
    """Returns for each layer what is subtracted from keys in int8, [Hk, D] float32, or None.

    Only caches in the memory of the CPU have keys in int8.
    """
    positions, device = centred_over(spec), weights.embed.device
    if not positions or device.type != "cpu":
        return [None] * len(weights.layers)
    ropes = [tables(table, spec.head_dim, positions, device) for table in spec.ropes]
    pairs = zip(weights.layers, spec.layers, strict=True)
    biases = [mixer(own.mixer.kind).key_bias(own.mixer, spec, layer) for own, layer in pairs]
    return [
        None if bias is None else key_centre(bias, *ropes[layer.rope])
        for bias, layer in zip(biases, spec.layers, strict=True)
    ]


def key_centre(bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the mean of the rotated bias, [Hk, D]. bias [Hk, D]; cos, sin [positions, D]: rotary tables; float32"""
    low, high = bias.double().chunk(2, dim=-1)
    (cos_low, cos_high), (sin_low, sin_high) = (table.double().mean(0).chunk(2) for table in (cos, sin))
    return torch.cat((low * cos_low - high * sin_low, high * cos_high + low * sin_high), dim=-1).float()


# Computes tables of rotary embeddings and of the factors that scale queries, float32, with one row per position.
#
# The kinds of rotary embeddings differ in their inverse frequencies and in the magnitude of cos and sin.

Device = torch.device | str


def tables(spec: RopeSpec, head_dim: int, positions: int, device: Device) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of position * inverse frequency, each [positions, head_dim] float32.

    Both halves of a row are equal. Dimensions that are not rotated have cos 1 and sin 0. The tables are computed on the
    CPU, so that every device uses the same bits.
    """
    head_dim = spec.head_dim or head_dim
    rotated = 0 if spec.kind == "none" else spec.rotated or head_dim
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(spec, rotated)  # [M, R/2]
    unrotated = (0, (head_dim - rotated) // 2)
    cos = pad(angles.cos() * spec.magnitude, unrotated, value=1.0)  # [M, D/2]
    sin = pad(angles.sin() * spec.magnitude, unrotated)
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((sin, sin), dim=-1).to(device)


def at_columns(found: list[tuple[Tensor, Tensor]], positions: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Returns tables [T, D] whose column d in row t is column d of the table `found` at position positions[t, d].

    positions: [T, D]; None: the tables `found` are returned
    """
    if positions is None:
        return found
    return [(cos.gather(0, positions), sin.gather(0, positions)) for cos, sin in found]


def query_scales(scaling: QueryScaling | None, positions: int, device: Device) -> Tensor | None:
    """Returns the factor by which queries are multiplied at each position, float32; None if all factors are 1."""
    if scaling is None or positions <= scaling.positions:
        return None
    steps = torch.arange(positions) // scaling.positions
    return (1 + scaling.beta * (1 + steps).float().log()).to(device)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Returns the radians per position for each pair of dimensions, [head_dim / 2] float32.

    head_dim: how many dimensions of a head are rotated.
    """
    plain = 1.0 / (spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / max(head_dim, 1)))
    if spec.kind == "longrope":
        return plain / torch.tensor(spec.factors)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "proportional":
        return torch.where(torch.arange(len(plain)) < spec.pairs, plain / spec.factor, 0.0)
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain, head_dim)
    return plain


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Stretches long wavelengths by `factor`, keeps short ones, and blends between them (Llama 3.1)."""
    turns = spec.original_positions / (2 * math.pi / plain)  # full rotations of each pair over the original positions
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = blend.clamp(0.0, 1.0)
    return (1 - keep) * plain / spec.factor + keep * plain


def _yarn(spec: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """Keeps pairs that rotate often, stretches pairs that rotate seldom, and blends between them (arXiv 2309.00071)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(spec.original_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return plain / spec.factor * stretch + plain * (1 - stretch)
