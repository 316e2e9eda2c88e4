"""Makes random weights for any spec directly on the device, without files or copies."""

import torch
from torch import Tensor

from bench.gpu.setup.expert_weights import Stored, random_experts
from worker.models.attention import AttentionWeights
from worker.models.decoder import Layer, Weights
from worker.models.mlp import DenseWeights
from worker.models.moe import MixtureWeights
from worker.ops.embedding import plain
from worker.ops.linear.packed import PackedLinear, pack, pack_quantized, pack_stacked
from worker.ops.quantized_weight import quantize, quantize_groups
from worker.spec import LayerSpec, ModelSpec

EMBED_STD = 0.02  # small compared with the layers' outputs; otherwise, with a tied head, the model repeats its input


def random_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool = True,
    seed: int = 0,
    scheme: Stored = None,
) -> Weights:
    """Returns random weights, scaled so that the values between the layers are about 1.

    So sums, maxima and power consumption are realistic. scheme: the quantization of the layers' weights.
    """
    maker = _Maker(spec, dtype, torch.Generator(device).manual_seed(seed), invariant, scheme)
    embed = maker.normal(spec.vocab_size, spec.hidden_size, std=EMBED_STD)
    head = embed if spec.tied else maker.normal(spec.vocab_size, spec.hidden_size, std=EMBED_STD)
    return Weights(
        embed=plain(embed),
        layers=[maker.layer(kind) for kind in spec.layers],
        norm=maker.norm(spec.hidden_size),
        head=pack(head, invariant=invariant),
    )


class _Maker:
    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, generator: torch.Generator, invariant: bool, scheme: Stored
    ) -> None:
        self._spec, self._dtype, self._generator = spec, dtype, generator
        self._invariant, self._scheme = invariant, scheme

    def normal(self, *shape: int, std: float) -> Tensor:
        made = torch.empty(shape, dtype=self._dtype, device=self._generator.device)
        return made.normal_(0.0, std, generator=self._generator)

    def norm(self, size: int) -> Tensor:
        return self.normal(size, std=0.1).add_(0.0 if self._spec.norm_offset else 1.0)

    def linear(self, rows: int, columns: int, bias: bool) -> PackedLinear:
        weight = self.normal(rows, columns, std=columns**-0.5)
        added = self._bias(bias, rows)
        if self._scheme is None:
            return pack(weight, added, invariant=self._invariant)
        if isinstance(self._scheme, tuple):
            codes = quantize_groups(weight, *self._scheme)
            return pack_stacked([codes], added, dtype=self._dtype, invariant=self._invariant)
        eight, dynamic = quantize(weight, self._scheme.kind), self._scheme.dynamic
        return pack_quantized(*eight, added, dtype=self._dtype, invariant=self._invariant, dynamic=dynamic)

    def _bias(self, wanted: bool, size: int) -> Tensor | None:
        return self.normal(size, std=0.1) if wanted else None

    def mlp(self, inner: int) -> DenseWeights:
        spec, hidden = self._spec, self._spec.hidden_size
        return DenseWeights(
            gate_up=self.linear(2 * inner, hidden, spec.mlp_bias), down=self.linear(hidden, inner, spec.mlp_bias)
        )

    def feed_forward(self, kind: LayerSpec) -> DenseWeights | MixtureWeights:
        spec, hidden, experts = self._spec, self._spec.hidden_size, self._spec.experts
        if experts is None or not kind.sparse:
            return self.mlp(spec.intermediate_size)
        gate = pack(self.normal(1, hidden, std=hidden**-0.5), invariant=True) if experts.shared_gated else None
        return MixtureWeights(
            shared=self.mlp(experts.shared_size) if experts.shared_size else None,
            experts=random_experts(spec, self._dtype, self._generator, self._scheme),
            shared_gate=gate,
        )

    def attention(self) -> AttentionWeights:
        spec, hidden = self._spec, self._spec.hidden_size
        return AttentionWeights(
            qkv=self.linear(spec.qkv_size, hidden, spec.qkv_bias),
            q_norm=self.norm(spec.head_dim) if spec.qk_norm else None,
            k_norm=self.norm(spec.head_dim) if spec.qk_norm else None,
            o=self.linear(hidden, spec.heads * spec.head_dim, spec.o_bias),
            sinks=self.normal(spec.heads, std=1.0).float() if spec.sinks else None,
        )

    def layer(self, kind: LayerSpec) -> Layer:
        spec, hidden = self._spec, self._spec.hidden_size
        return Layer(
            before_attention=self.norm(hidden),
            mixer=self.attention(),
            after_attention=self.norm(hidden) if spec.post_norms else None,
            before_mlp=self.norm(hidden),
            feed_forward=self.feed_forward(kind),
            after_mlp=self.norm(hidden) if spec.post_norms else None,
        )
