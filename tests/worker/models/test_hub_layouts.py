"""In checkpoints with the layouts of the hub, the language model is found and read, whatever else they hold."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import KINDS, Checkpoints
from tests.worker.models.harness import all_logits, cache_for, decoder_of, prompts_of
from tests.worker.models.quantized_checkpoints import State, save

LLAVA, NEW, PLAIN = ("language_model.model.", "language_model."), ("model.language_model.", ""), ("model.", "")
PIXTRAL_LAYER, SIGLIP_LAYER = "vision_tower.transformer.layers.0.", "vision_tower.vision_model.encoder.layers.0."
GEMMA4_LAYER, MTP_LAYER = "vision_tower.encoder.layers.0.", "mtp.layers.0."
PIXTRAL = (  # tensors that Mistral Small 3.1 and Ministral 3 have beside the language model
    *(PIXTRAL_LAYER + name for name in ("attention.q_proj", "attention_norm", "feed_forward.gate_proj", "ffn_norm")),
    "vision_tower.ln_pre", "vision_tower.patch_conv", "multi_modal_projector.norm", "multi_modal_projector.linear_1",
    "multi_modal_projector.patch_merger.merging_layer",
)  # fmt: skip
SIGLIP = (  # tensors that Gemma 3 has beside the language model
    *(SIGLIP_LAYER + name for name in ("layer_norm1", "mlp.fc1", "self_attn.q_proj", "self_attn.out_proj")),
    "vision_tower.vision_model.post_layernorm", "vision_tower.vision_model.embeddings.patch_embedding",
    "multi_modal_projector.mm_soft_emb_norm",
)  # fmt: skip
GEMMA4 = (
    *(GEMMA4_LAYER + name for name in ("input_layernorm", "self_attn.q_proj.linear", "post_feedforward_layernorm")),
    "audio_tower.layers.0.feed_forward1.ffw_layer_1.linear", "audio_tower.layers.0.norm_out",
    "embed_vision.embedding_projection", "embed_audio.embedding_projection",
)  # fmt: skip
QWEN = (
    "visual.blocks.0.attn.qkv", "visual.blocks.0.norm1", "visual.blocks.0.mlp.linear_fc1", "visual.merger.norm",
    *(MTP_LAYER + name for name in ("input_layernorm", "self_attn.q_proj", "mlp.gate_proj")), "mtp.fc",
    "mtp.norm", "mtp.pre_fc_norm_embedding",
)  # fmt: skip
OTHERS = (  # names that some families have in their language model, and heads and embeddings of other models
    *(f"encoder.layers.0.{name}" for name in ("self_attn.qkv_proj", "mlp.gate_up_proj", "post_self_attn_layernorm")),
    *(f"encoder.layers.0.{name}" for name in ("operator_norm", "shared_mlp.input_linear", "linear_attn.in_proj_qkvz")),
    *(f"encoder.layers.0.{name}" for name in ("mlp.c_proj", "attention_layernorm", "self_attn.query_layernorm")),
    "encoder.layers.0.feed_forward.w1", "encoder.embedding_norm", "mtp.embed_tokens", "mtp.lm_head", "talker.lm_head",
    "audio_tower.lm_head", "mtp.layers.0.mlp.c_fc", "score",
)  # fmt: skip
BESIDE = {"pixtral": PIXTRAL, "siglip": SIGLIP, "gemma4": GEMMA4, "qwen": QWEN, "others": OTHERS}
MULTIMODAL = [  # kind, model_type of the whole model, prefixes of language model and head, other tensors
    ("mistral", "mistral3", LLAVA, PIXTRAL), ("mistral", "mistral3", NEW, PIXTRAL),
    ("ministral3", "mistral3", LLAVA, PIXTRAL), ("ministral3", "mistral3", NEW, PIXTRAL),
    ("gemma3", "gemma3", LLAVA, SIGLIP), ("gemma3", "gemma3", NEW, SIGLIP),
    ("gemma4", "gemma4", NEW, GEMMA4), ("gemma4-moe", "gemma4", NEW, GEMMA4),
    ("qwen3_5", "qwen3_5", NEW, QWEN), ("qwen3_5-moe", "qwen3_5_moe", NEW, QWEN),
]  # fmt: skip


def renamed(state: State, text: str, head: str, beside: tuple[str, ...]) -> State:
    """Renames a checkpoint's tensors. text, head: new prefixes. beside: further tensors to add"""
    found = {f"{text}{name.removeprefix('model.')}": state[name] for name in state if name.startswith("model.")}
    found |= {f"{head}{name}": state[name] for name in state if not name.startswith("model.")}
    found |= {f"{text}{name}": torch.ones(8) for name in ("layers.0.self_attn.rotary_emb.inv_freq",)}
    inside = "model." if text == NEW[0] else ""  # transformers 5 has all tensors except the head below "model."
    return found | {
        f"{'' if name.startswith(('mtp.', 'score', 'talker.')) else inside}{name}.weight": torch.ones(3)
        for name in beside
    }


def logits(folder: Path) -> torch.Tensor:
    decoder = decoder_of(folder)
    return all_logits(decoder, cache_for(decoder, tokens=32), prompts_of([6]), chunk=6)[0]


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(checkpoints(kind), tmp_path / kind))


@pytest.mark.parametrize(("kind", "whole", "names", "beside"), MULTIMODAL)
def test_language_model_of_a_multimodal_checkpoint_has_the_logits_of_it_alone(
    copy: Callable[[str], Path], kind: str, whole: str, names: tuple[str, str], beside: tuple[str, ...]
) -> None:
    folder = copy(kind)
    alone, config = logits(folder), json.loads((folder / "config.json").read_text())
    save(folder, renamed(load_file(folder / "model.safetensors"), *names, beside))
    (folder / "config.json").write_text(json.dumps({"model_type": whole, "text_config": config}))
    assert torch.equal(logits(folder), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_spelling_of_a_language_model_is_that_of_its_own_tensors(copy: Callable[[str], Path], kind: str) -> None:
    """The checkpoint also has the tensors of every encoder, of layers that draft tokens, and heads of other models."""
    folder = copy(kind)
    alone, state = logits(folder), load_file(folder / "model.safetensors")
    every = tuple(name for names in BESIDE.values() for name in names)
    for text, head in (PLAIN, LLAVA):
        save(folder, renamed(state, text, head, every))
        assert torch.equal(logits(folder), alone)


def test_layers_after_the_last_one_that_predict_further_tokens_are_left_out(copy: Callable[[str], Path]) -> None:
    """GLM-4.5 stores its head for drafts as one more layer, which has an embedding and an output head of its own."""
    folder = copy("glm4-moe")
    alone, state = logits(folder), load_file(folder / "model.safetensors")
    last = {name.replace("layers.2.", "layers.3."): value for name, value in state.items() if "layers.2." in name}
    heads = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head")
    drafter = {f"model.layers.3.{name}.weight": torch.ones(3) for name in heads}
    save(folder, state | last | drafter)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert torch.equal(logits(folder), alone)
