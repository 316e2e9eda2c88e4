"""A chat about images is answered as the image processor, class and `generate` of transformers answer it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.frontend.chat.test_prompt import asked, context_of, openai_part, text
from tests.image_processors import processor_of
from tests.images import PIXTRALS, TEMPLATES, drawn, seeing_checkpoint
from tests.worker.vision.harness import Asked, Bench, Served

NEW = 12
SIZES = [(90, 70), (24, 24)]
# Gemma 4 12B's class makes other masks for a cache that grows: layers without a sliding window then also see the later
# tokens of an image. By Google's own code, and by the masks that the class makes for a static cache, they do not.
CACHES = {"gemma4_unified": "static"}
LEFT_OUT: dict[str, tuple[str, ...]] = {kind: () for kind in TEMPLATES}  # settings left to the defaults of a class
LEFT_OUT |= {f"{kind}, no hidden_act": ("vision_config", "hidden_act") for kind in PIXTRALS}
LEFT_OUT["gemma4_unified, no use_bidirectional_attention"] = ("text_config", "use_bidirectional_attention")


@pytest.mark.parametrize("case", LEFT_OUT)
async def test_answer_is_that_of_generate(case: str, tmp_path: Path) -> None:
    kind = case.split(",")[0]
    folder = seeing_checkpoint(kind, tmp_path)
    if LEFT_OUT[case]:
        section, name = LEFT_OUT[case]
        config = json.loads((folder / "config.json").read_text())
        del config[section][name]
        (folder / "config.json").write_text(json.dumps(config))
    images = [drawn(*size, seed=seed) for seed, size in enumerate(SIZES)]
    request = await asked([text("Look"), *map(openai_part, images), text("What?")], context_of(folder))
    processor = processor_of(kind, normalizes=True)
    content = [text("Look"), {"type": "image"}, {"type": "image"}, text("What?")]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(images=[images], text=[prompt], add_special_tokens=False, return_tensors="pt")
    ids = request.prompts[0]
    assert inputs["input_ids"].tolist() == [ids]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    found = model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, cache_implementation=CACHES.get(kind), disable_compile=True,
    )  # fmt: skip
    expected = [float(logits[0].log_softmax(-1).max()) for logits in found.logits]
    [(answer, logprobs)] = Bench(Served.of(folder)).answers(Asked(ids, list(request.features.images), NEW))
    assert answer == found.sequences[0, len(ids) :].tolist()
    assert max(abs(one - other) for one, other in zip(logprobs, expected, strict=True)) < 2e-3
