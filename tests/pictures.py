"""Tiny complete checkpoints that see pictures: tower, tokenizer, chat template and processor, as on the hub."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.checkpoints import VOCAB, byte_level_tokenizer
from tests.worker.vision.harness import MEAN, PIXTRALS, STD, build

SIDES = {"idefics3": 72, "gemma3": 64}
TOKENS = {"idefics3": 16, "gemma3": 16}  # tokens of a tile
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
LONGEST_EDGE = 96  # longest edge of pictures for Pixtral, in pixels
LFM2_TOKENS = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
LFM2_TOKENS += [f"<|img_row_{row}_col_{column}|>" for row in range(1, ROWS + 1) for column in range(1, ROWS + 1)]
LFM2_SETTINGS: dict[str, Any] = {
    "encoder_patch_size": 4, "tile_size": 16, "min_image_tokens": 2, "max_image_tokens": 16, "max_tiles": ROWS,
}  # fmt: skip
# What Lfm2VlImageProcessor makes of pictures with these settings, by width and height: rows and columns of tiles, and
# height and width of the whole picture.
LFM2_GRIDS = {(90, 40): (1, 2, (16, 48)), (30, 200): (4, 1, (80, 8)), (64, 64): (2, 2, (32, 32)),
              (40, 40): (1, 1, (32, 32)), (5, 5): (1, 1, (16, 16)), (20, 300): (4, 1, (120, 8))}  # fmt: skip
MERGES = {"mistral3": 2, "llava": 1}
QWENS = ("qwen2_5_vl", "qwen3_5", "qwen3_vl")
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
AREA = {"shortest_edge": 512, "longest_edge": 4096}  # bounds on the pixels of pictures for Qwen: 8 to 64 tokens
GEMMA4_NAMED = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
GEMMA4_AUDIO = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
SOFT_TOKENS = 70  # tokens of a picture for Gemma 4: the fewest that its processor allows
GEMMA3_NAMED = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


SPECIAL = {
    "idefics3": IDEFICS3_TOKENS,
    "lfm2_vl": LFM2_TOKENS,
    "gemma4_small": [*GEMMA4_NAMED.values(), *GEMMA4_AUDIO.values(), "<|video|>"],
    "gemma3": [*GEMMA3_NAMED.values(), "<start_of_turn>", "<end_of_turn>"],
    **dict.fromkeys(QWENS, QWEN_TOKENS),
    **dict.fromkeys(PIXTRALS, PIXTRAL_TOKENS),
}
NAMED = {
    "idefics3": {"image_token": "<image>"}, "lfm2_vl": {"image_token": "<image>"},
    "gemma4_small": {**GEMMA4_NAMED, **GEMMA4_AUDIO}, "gemma3": GEMMA3_NAMED,
    **{kind: {"image_token": "<|image_pad|>"} for kind in QWENS},
    **{kind: {"image_token": "[IMG]"} for kind in PIXTRALS},
}  # fmt: skip
TEMPLATES = {
    "idefics3": IDEFICS3_TEMPLATE, "gemma3": GEMMA3_TEMPLATE, **dict.fromkeys(QWENS, QWEN_TEMPLATE),
    **dict.fromkeys(PIXTRALS, PIXTRAL_TEMPLATE),
    "gemma4_small": QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image|>"),
    "lfm2_vl": QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>"),
}  # fmt: skip


class _WithoutVideo(Qwen3VLProcessor):  # type: ignore[misc]
    """Leaves out the processor for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)


class _WithoutVideoAndAudio(Gemma4Processor):  # type: ignore[misc]
    """Leaves out the processor for audio and, because it needs torchvision, the one for videos."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        if name in ("video_processor", "feature_extractor"):
            return None
        return super().check_argument_for_proper_class(name, argument)


class _OfPixtral:
    """Replaces PixtralProcessor, which cannot be imported without torchvision; pixels come from transformers.

    A row of tokens ends with [IMG_BREAK], the last row with [IMG_END]. PixtralProcessor of transformers 5.23 gave the
    same ids and pixels for 120 prompts of one to three pictures of random sizes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, square: int, settings: dict[str, Any]) -> None:
        self._tokenizer, self._square = tokenizer, square
        self._images = PixtralImageProcessorPil(size={"longest_edge": LONGEST_EDGE}, patch_size=square, **settings)

    def apply_chat_template(self, *conversation: Any, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(*conversation, tokenize=False, **options)

    def __call__(self, images: Any, text: list[str], **options: Any) -> dict[str, Any]:
        found = self._images(images[0])
        first, *others = text[0].split("[IMG]")
        for (height, width), after in zip(found["image_sizes"], others, strict=True):
            row = "[IMG]" * (width // self._square)
            first += "[IMG_BREAK]".join([row] * (height // self._square)) + "[IMG_END]" + after
        return {**found, "input_ids": self._tokenizer([first], **options)["input_ids"]}


class _OfLfm2:
    """Replaces Lfm2VlProcessor, which cannot be imported without torchvision, for pictures of LFM2_GRIDS."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def apply_chat_template(self, *conversation: Any, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(*conversation, tokenize=False, **options)

    def __call__(self, images: Any, text: list[str], **options: Any) -> dict[str, Any]:
        first, *others = text[0].split("<image>")
        pixels = []
        for image, after in zip(images[0], others, strict=True):
            rows, columns, (height, width) = LFM2_GRIDS[image.size]
            tiles, whole = "", "<image>" * (height * width // 64)
            if rows * columns > 1:
                levels = np.asarray(image.resize((16 * columns, 16 * rows), Image.Resampling.BILINEAR))
                for row in range(rows):
                    for column in range(columns):
                        tiles += f"<|img_row_{row + 1}_col_{column + 1}|>" + "<image>" * 4
                        pixels.append(levels[16 * row : 16 * row + 16, 16 * column : 16 * column + 16])
                tiles += "<|img_thumbnail|>"
            pixels.append(np.asarray(image.resize((width, height), Image.Resampling.BILINEAR)))
            first += f"<|image_start|>{tiles}{whole}<|image_end|>{after}"
        return {"pixel_values": pixels, "input_ids": self._tokenizer([first], **options)["input_ids"]}


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


def processor_of(kind: str) -> Any:
    """Returns the processor of transformers for the same tokenizer, without normalization of pixels."""
    tokenizer = tokenizer_of(kind)
    bare = {"do_rescale": False, "do_normalize": False}
    if kind in QWENS:
        images = Qwen2VLImageProcessorPil(size=AREA, patch_size=4, merge_size=2, temporal_patch_size=1, **bare)
        return _WithoutVideo(images, tokenizer, chat_template=tokenizer.chat_template)
    if kind in PIXTRALS:
        return _OfPixtral(tokenizer, 4 * MERGES[kind], bare)
    if kind == "gemma4_small":
        images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=SOFT_TOKENS, **bare)
        return _WithoutVideoAndAudio(None, images, tokenizer, None, chat_template=tokenizer.chat_template)
    if kind == "lfm2_vl":
        return _OfLfm2(tokenizer)
    side = SIDES[kind]
    if kind == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": side, "width": side}, do_pan_and_scan=False, **bare)
        return Gemma3Processor(images, tokenizer, tokenizer.chat_template, image_seq_length=TOKENS[kind])
    images = Idefics3ImageProcessorPil(size={"longest_edge": 3 * side}, max_image_size={"longest_edge": side}, **bare)
    return Idefics3Processor(images, tokenizer, TOKENS[kind], tokenizer.chat_template)


def seeing_checkpoint(kind: str, folder: Path) -> Path:
    """Saves a checkpoint that sees pictures."""
    tokenizer = tokenizer_of(kind)
    build(kind).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    token = tokenizer.convert_tokens_to_ids(tokenizer.image_token)
    config = json.loads((folder / "config.json").read_text())
    config |= {"image_token_id": token, "image_token_index": token}
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"gemma3": dict.fromkeys(("height", "width"), SIDES["gemma3"]), **dict.fromkeys(QWENS, AREA)}
    sizes |= {kind: {"longest_edge": LONGEST_EDGE} for kind in PIXTRALS}
    size = sizes.get(kind) or {"longest_edge": 3 * SIDES.get(kind, 0)}
    settings = {"image_mean": MEAN, "image_std": STD, "rescale_factor": 1 / 255, "do_normalize": True, "size": size}
    settings |= LFM2_SETTINGS if kind == "lfm2_vl" else {}
    if kind == "gemma4_small":
        settings |= {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": SOFT_TOKENS}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    """Draws a picture with an edge and noise."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    levels[: height // 2, : width // 3] = (250, 10, 60)
    return Image.fromarray(levels)
