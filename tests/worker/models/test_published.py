"""Small models with configs of well-known checkpoints, published or written by transformers, give its logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.worker.models.harness import all_logits, cache_for, decoder_of, prompts_of
from tests.worker.models.published import GEMMA3_4B, PUBLISHED, RELEASES, Config, shrunk
from worker.models.config import spec_from_config

PROMPTS = prompts_of([40, 100])


def saved(config: Config, folder: Path) -> Any:
    """Returns transformers' model for a config. Saves it to `folder`, with a config as transformers 5 writes it."""
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.eval().save_pretrained(folder)
    return model


@torch.no_grad()
def check(model: Any, folder: Path) -> None:
    decoder = decoder_of(folder, positions=128)
    found = all_logits(decoder, cache_for(decoder, tokens=256), PROMPTS, chunk=24)
    for one, prompt in zip(found, PROMPTS, strict=True):
        torch.testing.assert_close(one, model(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_transformers_logits_in_both_spellings(name: str, tmp_path: Path) -> None:
    config = shrunk(PUBLISHED[name])
    model = saved(config, tmp_path)
    check(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(model, tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_one_spec_in_both_spellings(name: str) -> None:
    config = PUBLISHED[name]
    new = AutoConfig.for_model(**config).to_dict()
    assert "rope_theta" not in new
    assert spec_from_config(new) == spec_from_config(config)


def test_published_configs_give_their_max_positions() -> None:
    lengths = {name: spec_from_config(config).max_positions for name, config in PUBLISHED.items()}
    told = {name: config["max_position_embeddings"] for name, config in PUBLISHED.items()}
    stretched = {"Qwen2.5-7B": 131_072, "Qwen3-8B": 131_072, "Phi-4-mini": 4096}  # Qwen with YaRN, Phi without longrope
    assert lengths == told | stretched


def _older(name: str) -> str:
    return "language_model." + name


def _newer(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize("rename", [_older, _newer])
def test_multimodal_checkpoint_gives_its_text_model(rename: Callable[[str], str], tmp_path: Path) -> None:
    gemma = shrunk({**PUBLISHED["gemma-3-1b-it"], **GEMMA3_4B["text_config"]})
    model = saved(gemma, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
    others = (
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
    )
    save_file(tensors | {name: torch.ones(3) for name in others}, file)
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA3_4B, "torch_dtype": "float32", "text_config": gemma}))
    check(model, tmp_path)


@pytest.mark.parametrize("name", RELEASES)
def test_release_is_served_under_the_name_of_an_older_one(name: str, tmp_path: Path) -> None:
    """The config is the release's; in a small model of four layers, the tensors have the names of the hub's files."""
    architecture, model_type, text = RELEASES[name]
    whole = {"architectures": [architecture], "model_type": model_type, "text_config": text}
    spec = spec_from_config(whole)
    recurrent = [layer.recurrent for layer in spec.layers]
    assert recurrent == [at % 4 != 3 for at in range(text["num_hidden_layers"])], "a quarter has attention"
    assert spec.max_positions == 262_144 and not spec.tied
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 512, "eos_token_id": 0, "dtype": "float32",
        "linear_num_value_heads": text["linear_num_value_heads"] // 8, "linear_num_key_heads": 2, "num_experts": 8,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 64, "max_position_embeddings": 256,
        "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.1,
        "rope_parameters": text["rope_parameters"] | {"mrope_section": [4, 2, 2]},
    }  # fmt: skip
    small = {**text, **{key: size for key, size in sizes.items() if key in text}}
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, text_config=small, vision_config=tower, tie_word_embeddings=False)
    model: Any = AutoModelForImageTextToText.from_config(config).eval()
    assert type(model).__name__ == architecture
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.norm.weight": torch.ones(64)}, file)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"text_config": {**written["text_config"], **small}}))
    check(model, tmp_path)
