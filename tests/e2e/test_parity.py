"""What comes out over HTTP is what transformers generates: three families, one at a time and 16 at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import WINDOW, Checkpoints
from tests.e2e.server import Server, serving

LENGTHS = [1, 15, 16, 17, WINDOW - 1, WINDOW + 1, 40, 63, 64, 65, 100, 130, 33, 7, 90, 48]
NEW = 100


def reference(folder: Path, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy ids of each prompt alone, in float32, end-of-text ids never special."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


def prompts_of(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_greedy_ids_over_http(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints(kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = prompts_of(500)
    wanted = reference(folder, prompts, NEW)

    def check(server: Server, index: int) -> None:
        events = server.events(prompts[index], NEW, ignore_eos=True)
        assert events.done is not None, events.error
        assert events.ids == wanted[index]
        assert events.text == tokenizer.decode(wanted[index], skip_special_tokens=True)
        assert events.done["finish_reason"] == "length"
        usage = events.done["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompts[index]), NEW)

    flags = ["--dtype", "float32", "--prefill-chunk-size", "48"]
    with serving(folder, tmp_path / "log", *flags) as server:
        for index in range(4):
            check(server, index)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda index: check(server, index), range(16)))
        server.until_idle()
