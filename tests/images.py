"""Tiny complete checkpoints that see images: tower, tokenizer, chat template and processor, as on the hub."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import VOCAB, byte_level_tokenizer
from tests.worker.vision.harness import GEMMA4S, MEAN, PIXTRALS, STD, build

SIDES = {"idefics3": 72, "smolvlm": 66, "gemma3": 64}
TOKENS = {"idefics3": 16, "smolvlm": 16, "gemma3": 16}  # tokens of a tile
ROWS = 4
IDEFICS3_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
IDEFICS3_TOKENS += [f"<row_{row}_col_{column}>" for row in range(1, ROWS + 1) for column in range(1, ROWS + 1)]
IDEFICS3_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}{% if message['content'][0]['type'] == 'image' %}"
    "{{ ':' }}{% else %}{{ ': ' }}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
GEMMA3_TEMPLATE = (
    "{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' %}{{ '<start_of_image>' }}{% elif item['type'] == 'text' %}"
    "{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for item in message['content'] %}{% if item['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% elif 'text' in item %}{{ item['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PIXTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'text' %}{{ item['text'] }}{% elif item['type'] in ('image', 'image_url') %}{{ '[IMG]' }}"
    "{% endif %}{% endfor %}{% endif %}{{ '[/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
PIXTRAL_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"]
LONGEST_EDGE = 96  # longest edge of images for Pixtral, in pixels
LFM2_TOKENS = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
LFM2_TOKENS += [f"<|img_row_{row}_col_{column}|>" for row in range(1, ROWS + 1) for column in range(1, ROWS + 1)]
LFM2_SETTINGS: dict[str, Any] = {
    "encoder_patch_size": 4, "tile_size": 16, "min_image_tokens": 2, "max_image_tokens": 16, "max_tiles": ROWS,
}  # fmt: skip
MERGES = {"mistral3": 2, "llava": 1}
TILED = ("idefics3", "smolvlm")
QWENS = ("qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe")
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
AREA = {"shortest_edge": 512, "longest_edge": 4096}  # bounds on the pixels of images for Qwen: 8 to 64 tokens
GEMMA4_NAMED = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
GEMMA4_AUDIO = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
SOFT_TOKENS = 70  # tokens of an image for Gemma 4: the fewest that its processor allows
GEMMA3_NAMED = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


SPECIAL = {
    **dict.fromkeys(TILED, IDEFICS3_TOKENS),
    "lfm2_vl": LFM2_TOKENS,
    **{kind: [*GEMMA4_NAMED.values(), *GEMMA4_AUDIO.values(), "<|video|>"] for kind in GEMMA4S},
    "gemma3": [*GEMMA3_NAMED.values(), "<start_of_turn>", "<end_of_turn>"],
    **dict.fromkeys(QWENS, QWEN_TOKENS),
    **dict.fromkeys(PIXTRALS, PIXTRAL_TOKENS),
}
NAMED = {
    **{kind: {"image_token": "<image>"} for kind in (*TILED, "lfm2_vl")}, "gemma3": GEMMA3_NAMED,
    **{kind: {**GEMMA4_NAMED, **GEMMA4_AUDIO} for kind in GEMMA4S},
    **{kind: {"image_token": "<|image_pad|>"} for kind in QWENS},
    **{kind: {"image_token": "[IMG]"} for kind in PIXTRALS},
}  # fmt: skip
TEMPLATES = {
    **dict.fromkeys(TILED, IDEFICS3_TEMPLATE), "gemma3": GEMMA3_TEMPLATE, **dict.fromkeys(QWENS, QWEN_TEMPLATE),
    **dict.fromkeys(PIXTRALS, PIXTRAL_TEMPLATE),
    **dict.fromkeys(GEMMA4S, QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image|>")),
    "lfm2_vl": QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>"),
}  # fmt: skip


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with the family's special tokens, and as many ids as the model has."""
    special = SPECIAL[kind]
    plain = byte_level_tokenizer(VOCAB - len(special))
    plain.add_tokens([AddedToken(one, special=True, normalized=False) for one in special], special_tokens=True)
    assert len(plain) == VOCAB
    return PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, bos_token=plain.bos_token, eos_token=plain.eos_token,
        pad_token=plain.eos_token, extra_special_tokens=NAMED[kind], chat_template=TEMPLATES[kind],
    )  # fmt: skip


POOLED = {"gemma4_small": 2, "gemma4_dense": 3, "gemma4_unified": 3}  # patches along a side of a token


def seeing_checkpoint(kind: str, folder: Path) -> Path:
    """Saves a checkpoint that sees images."""
    tokenizer = tokenizer_of(kind)
    build(kind).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    token = tokenizer.convert_tokens_to_ids(tokenizer.image_token)
    config = json.loads((folder / "config.json").read_text())
    config |= {"image_token_id": token, "image_token_index": token}
    others = {"video_token_id": ("<|video|>", "<|video_pad|>"), "audio_token_id": ("<|audio|>",)}
    vocab = tokenizer.get_vocab()
    config |= {name: vocab[one] for name, tokens in others.items() for one in tokens if one in vocab}
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"gemma3": dict.fromkeys(("height", "width"), SIDES["gemma3"]), **dict.fromkeys(QWENS, AREA)}
    sizes |= {kind: {"longest_edge": LONGEST_EDGE} for kind in PIXTRALS}
    size = sizes.get(kind) or {"longest_edge": 3 * SIDES.get(kind, 0)}
    settings = {"image_mean": MEAN, "image_std": STD, "rescale_factor": 1 / 255, "do_normalize": True, "size": size}
    settings |= LFM2_SETTINGS if kind == "lfm2_vl" else {}
    if kind in GEMMA4S:
        settings |= {"patch_size": 4, "pooling_kernel_size": POOLED[kind], "max_soft_tokens": SOFT_TOKENS}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    """Draws an image with an edge and noise."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    levels[: height // 2, : width // 3] = (250, 10, 60)
    return Image.fromarray(levels)
