"""EAGLE-3 checkpoints in the published layouts, and their drafts by the formulas of the paper, in plain PyTorch.

Here, tensors have the names of a flat checkpoint, such as `midlayer.self_attn.q_proj.weight`. Checkpoints of the
speculators library have `layers.0.` in place of `midlayer.`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu
from transformers import AutoModelForCausalLM

from tests.checkpoints import VOCAB

WEIGHTS, EPS, THETA = "model.safetensors", 1e-5, 10_000.0
HEADS, KV_HEADS, DIM, INNER = 4, 2, 24, 96
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class EagleKind:
    """served: the kind of the served model. layers: its layers that the head reads. ids: their ids in the config"""

    served: str
    layers: tuple[int, ...]
    ids: list[int]
    draft_vocab: int = 200
    hidden: int = 64
    own_embedding: bool = False
    bias: bool = False  # whether fc has a bias
    speculators: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # further entries of the config
    layer: dict[str, Any] = field(default_factory=dict)  # further entries of the layer's config

    def target_ids(self, vocab: int) -> Tensor:
        """Returns the served model's id for each id of the head. vocab: the size of the served model's vocabulary"""
        drawn = torch.randperm(vocab, generator=torch.Generator().manual_seed(self.draft_vocab))
        return torch.arange(vocab) if self.draft_vocab == vocab else drawn[: self.draft_vocab]


EAGLES = {
    "flat": EagleKind("llama", (1, 0, 2), [2, 1, 3]),
    "whole-vocabulary": EagleKind("qwen3", (1, 2), [1, 2], draft_vocab=VOCAB),
    "recurrent": EagleKind("qwen3_5", (1, 0, 2), [2, 1, 3], own_embedding=True, bias=True),
    "shared-kv": EagleKind("gemma4", (1, 4, 5), [1, 4, 5], hidden=96),
    "narrow": EagleKind("llama", (1, 0, 2), [2, 1, 3], hidden=48, own_embedding=True),
    "speculators": EagleKind(
        "llama", (1, 0, 2), [2, 1, 3], speculators=True, settings={"norm_before_residual": True, "fc_norm": True},
        layer={"model_type": "qwen3"},
    ),
    "speculators-3.1": EagleKind(
        "llama", (1, 0, 2), [2, 1, 3], speculators=True, settings={"norm_before_fc": True, "norm_output": True}
    ),
}  # fmt: skip


class Eagle:
    """An EAGLE-3 head for a model, with random weights."""

    def __init__(self, kind: EagleKind, folder: Path) -> None:
        """folder: the folder of the served model."""
        self.kind = kind
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        config = self.model.config
        self.target_hidden, self.vocab, hidden = config.hidden_size, config.vocab_size, kind.hidden
        draw = torch.Generator().manual_seed(len(kind.settings) + kind.hidden)
        self.tensors: dict[str, Tensor] = {}
        width = len(kind.layers) * self.target_hidden
        linears = {
            "fc": (hidden, width), "lm_head": (kind.draft_vocab, hidden),
            "midlayer.self_attn.q_proj": (HEADS * DIM, 2 * hidden),
            "midlayer.self_attn.k_proj": (KV_HEADS * DIM, 2 * hidden),
            "midlayer.self_attn.v_proj": (KV_HEADS * DIM, 2 * hidden),
            "midlayer.self_attn.o_proj": (hidden, HEADS * DIM),
            "midlayer.mlp.gate_proj": (INNER, hidden), "midlayer.mlp.up_proj": (INNER, hidden),
            "midlayer.mlp.down_proj": (hidden, INNER),
        }  # fmt: skip
        if kind.own_embedding:
            linears["embed_tokens"] = (self.vocab, hidden)
        norms = {f"midlayer.{name}": hidden for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        norms["norm"] = hidden
        if kind.settings.get("fc_norm"):
            norms |= {f"fc_norm.{at}": self.target_hidden for at in range(len(kind.layers))}
        if kind.settings.get("norm_before_fc"):
            norms["input_norm"] = width
        if kind.layer.get("model_type") == "qwen3":
            norms |= {"midlayer.self_attn.q_norm": DIM, "midlayer.self_attn.k_norm": DIM}
        for name, shape in linears.items():
            self.tensors[f"{name}.weight"] = torch.randn(shape, generator=draw) * 0.2
        for name, size in norms.items():
            self.tensors[f"{name}.weight"] = 1 + torch.randn(size, generator=draw) * 0.2
        if kind.bias:
            self.tensors["fc.bias"] = torch.randn(hidden, generator=draw)
        self.ids = kind.target_ids(self.vocab)
        if kind.draft_vocab < self.vocab:
            self.tensors["d2t"] = self.ids - torch.arange(kind.draft_vocab)
            self.tensors["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill_(0, self.ids, 1)

    def save(self, to: Path) -> Path:
        """Writes the checkpoint, and returns its folder."""
        to.mkdir()
        layer = {
            "model_type": "llama", "vocab_size": self.vocab, "hidden_size": self.kind.hidden,
            "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": DIM, "rms_norm_eps": EPS, "rope_theta": THETA,
            "hidden_act": "silu", "max_position_embeddings": 2048, **self.kind.layer,
        }  # fmt: skip
        config = {"draft_vocab_size": self.kind.draft_vocab, "torch_dtype": "float32", **self.kind.settings}
        tensors = self.tensors
        if self.kind.speculators:
            config |= {"architectures": ["Eagle3DraftModel"], "transformer_layer_config": layer, IDS: self.kind.ids}
            config["speculators_model_type"] = "eagle3"
            tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        else:
            config |= {"architectures": ["LlamaForCausalLMEagle3"], **layer, "eagle_config": {IDS: self.kind.ids}}
        (to / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / WEIGHTS)
        return to

    @torch.inference_mode()
    def propose(self, tokens: list[int], count: int) -> tuple[list[int], Tensor]:
        """Returns `count` greedy drafts after the tokens, and the logits [count, D] from which they are chosen."""
        features, drafts, logits = (
            self._joined(hidden_states(self.model, tokens[:-1], self.kind.layers)),
            list[int](),
            [],
        )
        for _ in range(count):
            output = self._layer(torch.tensor([*tokens, *drafts])[1:], features)[-1:]
            normed = self._norm(output, "norm")
            logits.append((normed @ self.tensors["lm_head.weight"].T)[0])
            drafts.append(int(self.ids[logits[-1].argmax()]))
            features = torch.cat((features, normed if self.kind.settings.get("norm_output") else output))
        return drafts, torch.stack(logits)

    def _joined(self, hidden: Tensor) -> Tensor:
        if self.kind.settings.get("fc_norm"):
            parts = hidden.chunk(len(self.kind.layers), dim=-1)
            hidden = torch.cat([self._norm(part, f"fc_norm.{at}") for at, part in enumerate(parts)], dim=-1)
        if self.kind.settings.get("norm_before_fc"):
            hidden = self._norm(hidden, "input_norm")
        return hidden @ self.tensors["fc.weight"].T + self.tensors.get("fc.bias", 0)

    def _layer(self, next_ids: Tensor, features: Tensor) -> Tensor:
        table = self.tensors.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        embedded = self._norm(embedding(next_ids, table), "midlayer.input_layernorm")
        normed = self._norm(features, "midlayer.hidden_norm")
        x = normed if self.kind.settings.get("norm_before_residual") else features
        x = x + self._attention(torch.cat((embedded, normed), dim=-1))
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up, down = (self.tensors[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return x + (silu(y @ gate) * (y @ up)) @ down

    def _attention(self, x: Tensor) -> Tensor:
        weights = {name: self.tensors[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkvo"}
        q, k, v = ((x @ weights[name]).view(len(x), -1, DIM).transpose(0, 1) for name in "qkv")  # [heads, T, DIM]
        if "midlayer.self_attn.q_norm.weight" in self.tensors:
            q, k = self._norm(q, "midlayer.self_attn.q_norm"), self._norm(k, "midlayer.self_attn.k_norm")
        q, k = _rotated(q), _rotated(k).repeat_interleave(HEADS // KV_HEADS, 0)
        scores = q @ k.transpose(1, 2) * DIM**-0.5 + torch.full((len(x), len(x)), -torch.inf).triu(1)
        mixed = scores.softmax(-1) @ v.repeat_interleave(HEADS // KV_HEADS, 0)
        return mixed.transpose(0, 1).flatten(1) @ weights["o"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, EPS)


def hidden_states(model: nn.Module, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """Returns the outputs [T, L * H] of L layers of a model of transformers, concatenated."""
    outputs: dict[int, Tensor] = {}
    hooks = [
        model.model.layers[at].register_forward_hook(lambda _, __, output, at=at: outputs.update({at: output}))
        for at in layers
    ]  # type: ignore[union-attr, index]
    model.model(torch.tensor([tokens]))  # type: ignore[operator]
    for hook in hooks:
        hook.remove()
    tensors = [outputs[at][0] if isinstance(outputs[at], tuple) else outputs[at] for at in layers]
    return torch.cat([tensor.view(len(tokens), -1) for tensor in tensors], dim=-1)


def _rotated(x: Tensor) -> Tensor:
    """Returns queries or keys [heads, T, DIM] rotated by their positions 0 .. T - 1."""
    angles = torch.arange(x.shape[1])[:, None] * THETA ** -(torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
