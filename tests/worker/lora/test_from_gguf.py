"""A GGUF adapter gives the same bits as the PEFT adapter that it was converted from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.gguf.translated import translated
from shared.lora import AdapterError
from tests.adapters import draw_adapter
from tests.checkpoints import Checkpoints
from tests.gguf_adapters import write_gguf
from tests.gguf_files import write
from tests.worker.lora.harness import Asked, added, answers, decoder_of, loaded
from worker.lora.loaded import Product

PROMPT = list(range(30, 50))
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def inputs_of(product: Product) -> torch.Tensor:
    assert product.a.cpu is not None
    return torch.randn(3, product.a.cpu.k)


@pytest.mark.parametrize(
    ("family", "type"), [("llama", "F16"), ("qwen3", "F32"), ("gemma3", "BF16"), ("mistral", "F32")]
)
def test_products_have_the_bits_of_those_of_the_folder(
    family: str, type: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(family)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type]
    folder = draw_adapter(base, tmp_path / "a", 7, r=6, targets=LINEARS, dtype=dtype, ranks={"v_proj": 3})
    decoder = decoder_of(base)
    one, other = (loaded(base, decoder, each) for each in (folder, write_gguf(folder, base, tmp_path / "a.gguf", type)))
    assert one.sha256 != other.sha256 and one.products.keys() == other.products.keys()
    for key, product in one.products.items():
        x = inputs_of(product)
        assert torch.equal(added(product, x), added(other.products[key], x)) and added(product, x).any()
    assert answers(decoder, [Asked(PROMPT, one)]) == answers(decoder, [Asked(PROMPT, other)])


def test_eight_bits_are_those_of_their_blocks(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Numbers that are whole multiples of a block's scale have no error in Q8_0."""
    base = checkpoints("llama")
    folder = draw_adapter(base, tmp_path / "a", 7, r=32, targets=LINEARS)
    file, draw = folder / "adapter_model.safetensors", torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(-126, 127, each.shape, generator=draw) / 256 for name, each in load_file(file).items()
    }
    for each in tensors.values():
        each[:, ::32] = 127 / 256
    save_file(tensors, file)
    decoder = decoder_of(base)
    one, other = (
        loaded(base, decoder, each) for each in (folder, write_gguf(folder, base, tmp_path / "a.gguf", "Q8_0"))
    )
    for key, product in one.products.items():
        x = inputs_of(product)
        assert torch.equal(added(product, x), added(other.products[key], x))


def test_adapter_and_base_in_gguf(tmp_path: Path) -> None:
    """Rows of queries and keys have llama.cpp's order in both files, and Hugging Face's order in memory."""
    written = write("llama", tmp_path)
    base = translated([written.file], tmp_path / "cache")
    folder = draw_adapter(written.reference, tmp_path / "a", 7, targets=LINEARS)
    decoder = decoder_of(base)
    found = [
        answers(decoder, [Asked(PROMPT, loaded(base, decoder, each))])
        for each in (folder, write_gguf(folder, written.reference, tmp_path / "a.gguf"))
    ]
    assert found[0] == found[1] != answers(decoder, [Asked(PROMPT, None)])


@pytest.mark.parametrize(
    ("family", "targets", "replaced", "words"),
    [
        ("qwen3", LINEARS, {"architecture": "llama"}, "architecture 'llama', the base model is qwen3"),
        ("qwen3", LINEARS, {"architecture": "nonsense"}, "architecture 'nonsense'"),
        ("qwen3_5", ("in_proj_qkv", "in_proj_z"), {}, "recurrent layers of qwen35"),
    ],
)
def test_adapters_for_another_model_are_refused_by_name(
    family: str, targets: tuple[str, ...], replaced: Any, words: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(family)
    file = write_gguf(draw_adapter(base, tmp_path / "a", 7, targets=targets), base, tmp_path / "a.gguf", **replaced)
    with pytest.raises(AdapterError, match=words):
        loaded(base, decoder_of(base), file)


@pytest.mark.parametrize("cut", [1, 3])
def test_outputs_that_are_no_whole_heads_are_refused(cut: int, checkpoints: Checkpoints, tmp_path: Path) -> None:
    base = checkpoints("llama")
    folder = draw_adapter(base, tmp_path / "a", 7, targets=("q_proj",))
    file = write_gguf(folder, base, tmp_path / "a.gguf")
    content = file.read_bytes()
    # position of the tensor's second size
    at = content.index(b"attn_q.weight.lora_b") + len("attn_q.weight.lora_b") + 4 + 8
    outputs = int.from_bytes(content[at : at + 8], "little")
    file.write_bytes(content[:at] + (outputs - cut).to_bytes(8, "little") + content[at + 8 :])
    with pytest.raises(AdapterError, match="not whole heads"):
        loaded(base, decoder_of(base), file)
