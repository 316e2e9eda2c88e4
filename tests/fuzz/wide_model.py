"""A tiny random checkpoint with a vocabulary of 152,000 tokens, as large as a real model's."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 152_000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Loops over `tools`, as templates of real models do, so that its time depends on what a client sends.
CHAT = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save(folder: Path, longest: int = 32_768) -> Path:
    """Writes the checkpoint into a folder and returns it. longest: the context in tokens"""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *alphabet, *(f"Ġw{number}" for number in range(VOCAB - len(SPECIAL) - len(alphabet)))]
    engine = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=engine, eos_token=SPECIAL[2], bos_token=SPECIAL[0], pad_token=SPECIAL[0],
        additional_special_tokens=[SPECIAL[1]], chat_template=CHAT, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=longest, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCAB
    return folder
