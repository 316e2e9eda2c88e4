"""The weights of a model: each layer's mixer, feed-forward network and norms; the embedding, last norm and head."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from worker.kernels.experts import PackedExperts
from worker.kernels.linear import PackedLinear
from worker.model.layer_inputs import LayerInputs, OwnInput


class MixerWeights(Protocol):
    """The weights of a mixer. Each kind of mixer has a record of its own (mixers/)."""

    @property
    def kind(self) -> str: ...

    @property
    def o(self) -> PackedLinear:
        """The output projection: the linear that is applied to the mixer's result."""

    @property
    def linears(self) -> Iterator[PackedLinear]: ...


class FeedForwardWeights(Protocol):
    """The weights of a feed-forward network. Each kind of network has a record of its own (feed_forward/)."""

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
    own_input: OwnInput | None = None  # the weights that apply the per-layer embedding
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
        if self.own_input is not None:
            yield from (self.own_input.gate, self.own_input.out)


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, on one device."""

    embed: Tensor  # embed_tokens [vocab, H]
    layers: list[Layer]
    norm: Tensor  # norm [H]
    head: PackedLinear  # lm_head: H → vocab
    layer_inputs: LayerInputs | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes the embeddings and all linears take in memory."""
        linears = (linear for layer in self.layers for linear in layer.linears)
        inputs = 0 if self.layer_inputs is None else self.layer_inputs.nbytes
        return self.embed.nbytes + inputs + sum(linear.nbytes for linear in (*linears, self.head))
