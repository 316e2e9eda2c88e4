"""Answers with adapters equal the answers of PEFT, and of the base model with the products merged into its weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shared.gguf.translated import translated
from shared.lora import AdapterError
from tests.adapters import draw_adapter
from tests.checkpoints import KINDS, VOCAB, Checkpoints
from tests.gguf_files import mixed, write
from tests.worker.lora.harness import Asked, answers, decoder_of, loaded
from tests.worker.models.quantized_checkpoints import gptq, rewrite

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FAMILIES = ("llama", "qwen3", "gemma3", "qwen3-moe")
PROMPT = [(7 * i) % (VOCAB - 3) + 3 for i in range(20)]
NEW = 100


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """Writes the base model with an adapter's products added to its weights in float64."""
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights, factors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    facts = json.loads((adapter / "adapter_config.json").read_text())
    for name in factors:
        if ".lora_A." in name:
            a, b = factors[name].double(), factors[name.replace("lora_A", "lora_B")].double()
            rank = len(a)
            scale = facts["lora_alpha"] / (rank**0.5 if facts["use_rslora"] else rank)
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[target] = (weights[target].double() + scale * (b @ a)).float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # PEFT warns about adapters of experts
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_with_an_adapter_are_those_of_peft(family: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    import peft  # takes two seconds, and few tests need it

    base = checkpoints(family)
    linears = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
    folder = draw_adapter(
        base, tmp_path / "a", 3, targets=linears, ranks={"v_proj": 4, "k_proj": 12}, experts=family == "qwen3-moe",
        use_rslora=family == "qwen3",
    )  # fmt: skip
    decoder = decoder_of(base)
    found = answers(decoder, [Asked(PROMPT, loaded(base, decoder, folder), NEW), Asked(PROMPT, None, NEW)])
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    changed = peft.PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        logits = changed(torch.tensor([PROMPT + found[0]])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == found[0], "each id is the greedy one after those before it"
    assert found[0] != found[1], "the adapter changes the answer"


def test_adapter_of_keys_and_values_in_latent_attention_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("deepseek-v2")
    folder = draw_adapter(base, tmp_path / "a", 4, targets=("o_proj", "kv_b_proj"))
    with pytest.raises(AdapterError, match="kv_b_proj, which the base model lacks or which adapters cannot change"):
        loaded(base, decoder_of(base), folder)


@pytest.mark.parametrize("family", KINDS)
def test_answers_with_an_adapter_are_those_of_merged_weights(
    family: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(family)
    folder = draw_adapter(base, tmp_path / "a", 4, r=6, size=0.15)
    decoder = decoder_of(base)
    whole = decoder_of(merged(base, folder, tmp_path / "merged"))
    asked = Asked(PROMPT, loaded(base, decoder, folder), 30)
    assert answers(decoder, [asked]) == answers(whole, [Asked(PROMPT, None, 30)])


@pytest.mark.parametrize("form", ["gptq", "gguf"])
def test_adapter_on_a_base_in_few_bits_is_that_on_its_dequantized_weights(
    form: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    if form == "gguf":  # the file has rows of queries and keys in another order, which loading undoes
        written = write("llama", tmp_path, mixed)
        few, full = translated([written.file], tmp_path / "cache"), written.reference
    else:
        few, full = (Path(shutil.copytree(checkpoints("llama"), tmp_path / name)) for name in ("few", "full"))
        rewrite(few, gptq(act_order=True)), rewrite(full, gptq(act_order=True), widened=True)
    folder = draw_adapter(full, tmp_path / "a", 5)
    decoder, whole = decoder_of(few), decoder_of(merged(full, folder, tmp_path / "merged"))
    asked = Asked(PROMPT, loaded(few, decoder, folder), 40)
    assert answers(decoder, [asked]) == answers(whole, [Asked(PROMPT, None, 40)])
    assert answers(decoder, [Asked(PROMPT, None, 40)]) != answers(decoder, [asked])
