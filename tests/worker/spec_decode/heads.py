"""Makes checkpoints with an MTP head out of transformers' own layers, and computes the head's drafts with them."""

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

WEIGHTS = "model.safetensors"
QWEN = {"join": "mtp.fc", "e": "mtp.pre_fc_norm_embedding", "h": "mtp.pre_fc_norm_hidden", "last": "mtp.norm"}
GLM = {"join": "eh_proj", "e": "enorm", "h": "hnorm", "last": "shared_head.norm"}
GLM = {field: f"model.layers.3.{name}" for field, name in GLM.items()}


@dataclass(frozen=True)
class HeadKind:
    layer: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    prefix: str
    names: dict[str, str]


HEADS = {
    "qwen3_5": HeadKind(Qwen3_5DecoderLayer, Qwen3_5RMSNorm, "mtp.layers.0.", QWEN),
    "qwen3_5-moe": HeadKind(Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm, "mtp.layers.0.", QWEN),
    "qwen3-next": HeadKind(Qwen3NextDecoderLayer, Qwen3NextRMSNorm, "mtp.layers.0.", QWEN),
    "glm4-moe": HeadKind(Glm4MoeDecoderLayer, Glm4MoeRMSNorm, "model.layers.3.", GLM),
    "deepseek-v3": HeadKind(DeepseekV3DecoderLayer, DeepseekV3RMSNorm, "model.layers.3.", GLM),
}


class Head(nn.Module):
    """The head of a model, in plain PyTorch around a layer of transformers."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__()
        of, self.model = HEADS[kind], AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        config = copy.deepcopy(self.model.config)
        config.layer_types = ["full_attention"] * 4
        torch.manual_seed(17)
        self.layer = of.layer(config, 3 if of.names is GLM else 0).eval()
        self.e, self.h, self.last = (of.norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.join = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not name.startswith("model."):  # the modules of transformers leave some parameters uninitialized
                    values = torch.randn_like(parameter) * 0.15
                    parameter.copy_(values + (parameter if parameter.dim() == 1 else 0))
            for name, buffer in self.layer.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn_like(buffer) * 0.2)

    @torch.inference_mode()
    def propose(self, tokens: list[int], count: int) -> tuple[list[int], Tensor]:
        """Returns `count` greedy drafts after the tokens, and the logits [count, V] from which they are chosen."""
        hidden = self.model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        drafts, logits = list[int](), []
        for _ in range(count):
            output = self._forward(torch.tensor([*tokens, *drafts])[1:], hidden)[-1:]
            logits.append(self.model.lm_head(output)[0])
            drafts.append(int(logits[-1].argmax()))
            hidden = torch.cat((hidden, output))
        return drafts, torch.stack(logits)

    def _forward(self, next_ids: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.e(self.model.model.embed_tokens(next_ids))
        x = self.join(torch.cat((embedded, self.h(hidden)), dim=-1))[None]
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), float("-inf")).triu(1)
        rotary = self.model.model.rotary_emb(x, positions)
        output = self.layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        normed: Tensor = self.last(output[0] if isinstance(output, tuple) else output)[0]
        return normed


def with_head(kind: str, folder: Path, to: Path) -> Head:
    """Copies a checkpoint with one file of weights, and adds a head to it."""
    head, of = Head(kind, folder), HEADS[kind]
    shutil.copytree(folder, to)
    parts = {"join": head.join, "e": head.e, "h": head.h, "last": head.last}
    added = {f"{of.names[field]}.weight": part.weight.data for field, part in parts.items()}
    for name, tensor in head.layer.state_dict().items():
        added |= {of.prefix + own: part for own, part in _as_published(name, tensor).items()}
    if of.names is GLM:  # published checkpoints of GLM and DeepSeek have copies of these, which no code reads
        added |= {f"{of.prefix}{name}.weight": torch.zeros(3, 5) for name in ("embed_tokens", "shared_head.head")}
    stored = {name: tensor.contiguous() for name, tensor in added.items()}
    save_file(load_file(to / WEIGHTS) | stored, to / WEIGHTS, metadata={"format": "pt"})
    return head


def _as_published(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns a parameter as the tensors of a published checkpoint, in which each expert has its own tensors."""
    module, _, last = name.rpartition(".")
    if not module.endswith("experts") or tensor.dim() != 3:
        return {name: tensor}
    named: dict[str, Any] = {}
    for at, own in enumerate(tensor):
        pairs = zip(("gate_proj", "up_proj"), own.chunk(2), strict=True) if last == "gate_up_proj" else [(last, own)]
        named |= {f"{module}.{at}.{linear}.weight": part.clone() for linear, part in pairs}
    return named
