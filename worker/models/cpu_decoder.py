"""A decoder for the CPU whose loop over the layers is in C: one call per step, and the same bits as the Python loop.

`fastest_decoder` chooses between this decoder and model/decoder.py once, after the model is loaded.
"""

from copy import copy

import torch
from torch import Tensor

from worker.kernels.cpu.adapters_c import StepAdaptersC
from worker.kernels.cpu.decoder_c import NORMS, DecoderC, DecoderCLayer, StepRows
from worker.kernels.cpu.ranks_c import RanksC
from worker.kernels.operations import FAST, Operations
from worker.kernels.rowwise.activate import ACTIVATIONS
from worker.kv_cache.tensors import KVCache
from worker.model import rope
from worker.model.decoder import Decoder
from worker.model.feed_forward.kinds import feed_forward
from worker.model.inputs.columns_in_c import STEP_COLUMNS, columns_in_c
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.model.layer import Layer
from worker.model.layer_inputs import in_c, vectors_of_layers
from worker.model.layer_parts import Place
from worker.model.mixers.kinds import mixer


class CpuDecoder:
    """Has the interface of Decoder, but works with one cache only: the C library holds the cache tensors' addresses."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, layers: list[DecoderCLayer], ranks: RanksC | None = None
    ) -> None:
        """ranks: the processes that hold the other parts of the model; None if `decoder` is whole (parts/share.py)"""
        spec = decoder.spec
        self.spec, self.operations, self.max_positions = spec, decoder.operations, decoder.max_positions
        self.layers_started, self.count_replayed = decoder.layers_started, decoder.count_replayed
        self.logits = decoder.logits
        self._decoder, self._cache = decoder, cache
        self._adapters: StepAdaptersC | None = None
        self._layers = DecoderC(
            layers, decoder.weights.norm, eps=spec.norm_eps, offset=spec.norm_offset, scale=spec.attention_scale,
            softcap=spec.attention_softcap, residual_scale=spec.residual_scale, query_scales=decoder.query_scales,
            activation=ACTIVATIONS.index(spec.activation), parallel=spec.parallel,
            layers_started=decoder.layers_started, columns=STEP_COLUMNS, ranks=ranks,
        )  # fmt: skip

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Computes the same as Decoder.forward. `cache` must be the cache that this decoder was made with."""
        return self.logits(self.hidden(inputs, cache))

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        """Computes the same as Decoder.hidden. The next step overwrites the returned tensor."""
        assert cache is self._cache and (inputs.read_slots is not None or not cache.states)
        decoder, layers = self._decoder, self._layers
        x = layers.embeddings(len(inputs.token_ids))
        torch.index_select(decoder.weights.embed, 0, inputs.token_ids, out=x)
        if decoder.embed_scale != 1.0:
            x *= decoder.embed_scale
        if inputs.replaced is not None:
            x.index_copy_(0, *inputs.replaced)
        own = vectors_of_layers(decoder.weights.layer_inputs, inputs, x, self.spec.norm_eps, self.operations)
        count = len(self.spec.layers)
        of_all = 1 + self.spec.last_kept if inputs.few_logits else count
        tables = None if inputs.rotary is None else rope.at_columns(decoder.ropes, inputs.rotary)[0]
        outputs = _rows(inputs.only_logits(), tables) if of_all < count else None
        return layers.run(_rows(inputs, tables), own, layers_of_all=of_all, adapters=self._adapters, outputs=outputs)

    def residual(self, rows: int) -> Tensor:
        """Returns the residual stream [rows, H] after the last step. rows: the number of rows of that step"""
        return self._layers.embeddings(rows)

    def with_operations(self, operations: Operations) -> "Decoder | CpuDecoder":
        """Returns a decoder with other operations that shares the weights of this decoder.

        The C loop can run FAST, with or without adapters; a decoder with any other operations loops in Python."""
        adapters = operations.in_c()
        if adapters is None:
            return self._decoder.with_operations(operations)
        other = copy(self)
        other._adapters = adapters
        return other


def _rows(inputs: ForwardInputs, tables: tuple[Tensor, Tensor] | None) -> StepRows:
    """tables: cos and sin for each row if the step has M-RoPE, else None; a model with M-RoPE has one rotary table"""
    tokens, outputs = len(inputs.token_ids), len(inputs.logits_indices)
    return StepRows(columns_in_c(inputs), tokens, outputs, inputs.page_tables, inputs, inputs.visible_to,
        None if tables is None or inputs.rope_rows is None else (*tables, inputs.rope_rows),
        inputs.added, None if inputs.replaced is None else inputs.replaced[0], inputs.first, inputs.tapped,
    )  # fmt: skip


def fastest_decoder(decoder: Decoder, cache: KVCache, ranks: RanksC | None = None) -> Decoder | CpuDecoder:
    """Returns a CpuDecoder if the C library has packed all weights and supports the cache's format, else `decoder`.

    ranks: as for CpuDecoder
    """
    spec, dtype = decoder.spec, decoder.weights.embed.dtype
    places = [Place(index, spec, decoder.ropes, cache, dtype) for index in range(len(spec.layers))]
    if decoder.operations is not FAST or not all(mixer(place.layer.mixer).runs_in_c(place) for place in places):
        return decoder
    if any(linear.cpu is None for layer in decoder.weights.layers for linear in layer.linears):
        return decoder
    pairs = zip(decoder.weights.layers, places, strict=True)
    return CpuDecoder(decoder, cache, [_layer_in_c(*pair) for pair in pairs], ranks)


def _layer_in_c(layer: Layer, place: Place) -> DecoderCLayer:
    mixed = mixer(layer.mixer.kind).in_c(layer.mixer, place)
    fed = feed_forward(layer.feed_forward.kind).in_c(layer.feed_forward, place.spec)
    return DecoderCLayer(
        **mixed, **fed, **(in_c(layer.own_input) if layer.own_input is not None else {}),
        **{name: getattr(layer, name) for name in NORMS},
        scale=None if layer.scale is None else layer.scale.float(),
    )  # fmt: skip
