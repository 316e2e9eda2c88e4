"""Complete checkpoints load exactly; broken ones fail with one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.models.harness import CPU, Oracle, all_logits, cache_for, decoder_of, prompts_of
from worker.checkpoint.checkpoint import CheckpointError, read_config, resolve, tokenizer_ends
from worker.engine.build import load_engine
from worker.models.config import spec_from_config
from worker.models.decoder import Weights
from worker.models.load import load
from worker.ops.linear import linear

State = dict[str, torch.Tensor]


def load_folder(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Weights:
    return load(folder, spec_from_config(read_config(folder)), dtype, CPU, invariant=False, **how)


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that copies a checkpoint, so that a test may break it."""
    return lambda kind, **how: Path(shutil.copytree(checkpoints(kind, **how), tmp_path / kind))


def edit(folder: Path, change: Callable[[State], Any]) -> Path:
    """Rewrites model.safetensors. Each tensor is cloned, because safetensors refuses tensors that share memory."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    decoder = decoder_of(folder, dtype=dtype)
    (prompt,) = prompts_of([40])
    return all_logits(decoder, cache_for(decoder, tokens=64), [prompt], chunk=40)[0]


@pytest.mark.parametrize("kind", ["llama", "qwen3-tied", "gemma3"])
def test_sharded_checkpoint_equals_single_file(checkpoints: Checkpoints, kind: str) -> None:
    sharded = checkpoints(kind, shard="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(sharded), logits(checkpoints(kind)))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_stored_formats_load_as_float32(checkpoints: Checkpoints, stored: torch.dtype) -> None:
    folder = checkpoints("llama", dtype=stored)
    (prompt,) = prompts_of([40])
    torch.testing.assert_close(logits(folder), Oracle(folder).logits(prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_rounded_to_the_requested_dtype(checkpoints: Checkpoints, dtype: torch.dtype) -> None:
    exact = load_folder(checkpoints("qwen3"))
    weights = load_folder(checkpoints("qwen3"), dtype)
    assert torch.equal(weights.embed.table(), exact.embed.table().to(dtype))
    assert torch.equal(weights.layers[1].before_mlp, exact.layers[1].before_mlp.to(dtype))


def test_weight_that_is_too_large_for_float16_says_so(copy: Callable[..., Path]) -> None:
    folder = edit(copy("llama"), lambda state: state[Q].view(-1)[3:4].fill_(1e5))
    assert load_folder(folder, torch.bfloat16)
    with pytest.raises(CheckpointError, match=rf"{Q} contains a .* not finite in float16.*--dtype bfloat16"):
        load_folder(folder, torch.float16)


def test_projections_are_stacked_in_order(checkpoints: Checkpoints) -> None:
    folder = checkpoints("llama-biased")
    state, layer = load_file(folder / "model.safetensors"), load_folder(folder).layers[2]
    stacks = [
        (layer.mixer.qkv, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        (layer.feed_forward.gate_up, ["mlp.gate_proj", "mlp.up_proj"]),
        (layer.mixer.o, ["self_attn.o_proj"]),
    ]
    for packed, names in stacks:
        weight, bias = (
            torch.cat([state[f"model.layers.2.{name}.{kind}"] for name in names]) for kind in ("weight", "bias")
        )
        assert torch.equal(linear(torch.eye(weight.shape[1]), packed), weight.T + bias)


def test_progress_counts_every_byte_once(checkpoints: Checkpoints) -> None:
    seen: list[tuple[int, int]] = []
    folder = checkpoints("qwen3")
    load_folder(folder, on_progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert seen[0] == (0, total) and seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_weights_are_copied_out_of_the_file(copy: Callable[..., Path]) -> None:
    folder = copy("llama")
    weights = load_folder(folder)
    before = weights.embed.table().clone()
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * ((folder / "model.safetensors").stat().st_size - 4096))
    assert torch.equal(weights.embed.table(), before)


def test_tied_checkpoint_may_repeat_its_embedding(copy: Callable[..., Path], checkpoints: Checkpoints) -> None:
    def repeat(state: State) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]

    assert torch.equal(logits(edit(copy("llama-tied"), repeat)), logits(checkpoints("llama-tied")))


def test_tied_checkpoint_with_another_head_uses_it(copy: Callable[..., Path]) -> None:
    def other(state: State) -> None:
        state["lm_head.weight"] = -state["model.embed_tokens.weight"]

    folder = edit(copy("llama-tied"), other)
    (prompt,) = prompts_of([40])
    torch.testing.assert_close(logits(folder), Oracle(folder).logits(prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("text", "head"), [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")]
)
def test_text_model_of_a_multimodal_checkpoint_is_loaded(
    copy: Callable[..., Path], checkpoints: Checkpoints, text: str, head: str
) -> None:
    """Tensors of the text model have old or new names; tensors of the vision model are not read."""
    folder = copy("gemma3")

    def rename(state: State) -> None:
        for name in list(state):
            state[text + name.removeprefix("model.")] = state.pop(name)
        state[head + "weight"] = state[text + "embed_tokens.weight"]
        for name in ("vision_tower.encoder.layers.0.weight", "model.vision_tower.norm.weight", "projector.weight"):
            state[name] = torch.ones(3)

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    assert torch.equal(logits(edit(folder, rename)), logits(checkpoints("gemma3")))


def test_old_rotary_tables_in_a_checkpoint_are_ignored(copy: Callable[..., Path], checkpoints: Checkpoints) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = edit(copy("llama"), lambda state: state.update({name: torch.ones(16)}))
    assert torch.equal(logits(folder), logits(checkpoints("llama")))


Q = "model.layers.1.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[Callable[[State], Any], list[str]]] = {
    "missing": (lambda state: state.pop(Q), [Q, "missing"]),
    "missing head": (lambda state: state.pop("lm_head.weight"), ["lm_head.weight", "missing"]),
    "missing embedding": (lambda state: state.pop("model.embed_tokens.weight"), ["embed_tokens.weight", "missing"]),
    "misshaped": (lambda state: state.update({Q: state[Q][:-1]}), [Q, "[127, 64]", "[128, 64]", "model.safetensors"]),
    "transposed": (lambda state: state.update({Q: state[Q].T}), [Q, "[64, 128]", "[128, 64]"]),
    "a layer too many": (
        lambda state: state.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}),
        ["model.layers.3.mlp.up_proj.weight", "does not belong"],
    ),
    "a bias too many": (
        lambda state: state.update({Q.replace("weight", "bias"): torch.ones(128)}),
        [Q.replace("weight", "bias"), "does not belong"],
    ),
    "integers": (lambda state: state.update({Q: state[Q].to(torch.int8)}), [Q, "I8", "BF16"]),
    "a name of two lines": (lambda state: state.update({"model.a\nb": torch.ones(2)}), [r"model.a\nb", "not belong"]),
    "a long name": (lambda state: state.update({"model." + "x" * 999: torch.ones(2)}), ["model.x", "xx… does not"]),
    **{
        f"{number} in {name}": (lambda state, name=name, number=number: state[name].view(-1)[3:4].fill_(number), [name])
        for name in (Q, "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight", "model.norm.weight")
        for number in (float("nan"), float("-inf"))
    },
}


@pytest.mark.parametrize("case", BROKEN)
def test_wrong_tensor_is_named(copy: Callable[..., Path], case: str) -> None:
    change, words = BROKEN[case]
    folder = edit(copy("llama"), change)
    with pytest.raises(CheckpointError) as caught:
        load_folder(folder)
    assert all(word in str(caught.value) for word in [*words, str(folder)]), caught.value
    assert "\n" not in str(caught.value)


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3)


FILES: dict[str, Callable[[Path], Any]] = {
    "truncated": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "a pointer": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", FILES)
@pytest.mark.parametrize("how", [{}, {"shard": "200KB"}], ids=["single", "sharded"])
def test_broken_file_is_named(copy: Callable[..., Path], how: dict[str, str], damage: str) -> None:
    folder = copy("llama", **how)
    path = sorted(folder.glob("*.safetensors"))[-1]
    FILES[damage](path)
    with pytest.raises(CheckpointError) as caught:
        load_folder(folder)
    assert path.name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_broken_config_is_named(copy: Callable[..., Path], content: str | None) -> None:
    path = copy("llama") / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(path.parent)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": []}'])
def test_broken_index_is_named(copy: Callable[..., Path], content: str) -> None:
    folder = copy("llama", shard="200KB")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load_folder(folder)


@pytest.mark.parametrize(("generation", "ends"), [({"eos_token_id": [5, 6]}, (5, 6)), ({}, (2,)), (None, (2,))])
def test_generation_config_overrides_eos_ids(
    copy: Callable[..., Path], generation: dict[str, Any] | None, ends: tuple[int, ...]
) -> None:
    folder = copy("llama")
    path = folder / "generation_config.json"
    path.unlink() if generation is None else path.write_text(json.dumps(generation))
    assert spec_from_config(read_config(folder)).eos_ids == ends


def test_tokenizer_eos_is_an_eos_id_as_well(copy: Callable[..., Path]) -> None:
    folder = copy("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    (folder / "generation_config.json").unlink()
    engine = load_engine(ModelConfig(model=str(folder)), WorkerConfig(device="cpu", kv_cache_gb=0.01))
    assert engine.limits.eos_token_ids == (7, 2), "config.json's, and <|im_end|>"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": {"content": "<|endoftext|>"}}))
    assert tokenizer_ends(folder) == (0,)
    (folder / "tokenizer_config.json").unlink()
    assert tokenizer_ends(folder) == ()


def test_resolve_of_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "a/b/c", "what is this"])
def test_resolve_of_a_path_does_not_ask_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="is neither a folder nor a GGUF file"):
        resolve(name)


def test_resolve_offline_without_cache_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"'Qwen/Qwen3-0\.6B' is not a folder here") as caught:
        resolve("Qwen/Qwen3-0.6B")
    assert "\n" not in str(caught.value)
