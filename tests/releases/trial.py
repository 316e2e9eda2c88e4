"""Writes a release with random weights of small sizes in a form, as the hub has it, and tries to serve it.

All sizes are cut, but groups and blocks of the form stay legal. A release in full precision is also read by
transformers, whose loader says whether the names are those of the class, and whose logits must be the same. A form of
few bits must have the logits of its numbers in full precision.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from bench.peers.gguf_file import finish
from shared import messages as m
from shared.wire import pack_u32
from tests.checkpoints import EOS, VOCAB, byte_level_tokenizer
from tests.gguf_files import write as write_gguf
from tests.gguf_towers import rounded, write_pair
from tests.images import seeing_checkpoint
from tests.releases.forms import FORMS, in_form
from tests.releases.layouts import shape_of, sizes_of
from tests.releases.mixes import MIXES
from tests.releases.releases import PLAIN, RELEASES, Release
from tests.worker.model_runner.harness import MAX_SEQ_LEN, RunnerBench
from tests.worker.models.harness import CPU, all_logits, cache_for, decoder_of, prompts_of
from worker.checkpoint.checkpoint import CheckpointError, read_config, resolve
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.models.load import load
from worker.quantization.methods import AS_STORED
from worker.spec_decode.mtp import load_head
from worker.vision.weights import tower_of

Config = dict[str, Any]
State = dict[str, Tensor]
SERVED, REFUSED = "served", "refused"
BY_NAME: Mapping[str, Release] = {release.model: release for release in RELEASES}
LENGTH, ANSWER = 24, 6  # tokens of the prompt and of the answer
SIZES: Mapping[str, int] = {
    "hidden_size": 256, "intermediate_size": 256, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB,
    "num_attention_heads": 4, "moe_intermediate_size": 128, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "top_k_experts": 2, "shared_expert_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128, "shared_intermediate_size": 128, "kv_lora_rank": 128,
    "q_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "max_position_embeddings": 512, "sliding_window": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "mamba_n_heads": 8, "mamba_d_head": 64,
    "mamba_num_heads": 8, "mamba_head_dim": 64, "mamba_d_state": 32, "ssm_state_size": 32, "global_head_dim": 128,
    "hidden_size_per_layer_input": 128, "prefix_dense_intermediate_size": 256, "eos_token_id": EOS, "pad_token_id": 0,
    "bos_token_id": 0, "block_ff_dim": 384, "block_multiple_of": 128, "block_dim": 256, "conv_dim": 256,
    "num_heads": 4, "rotary_dim": 32, "original_max_position_embeddings": 128, "num_kv_shared_layers": 0,
    "full_attention_interval": 2, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2, "n_routed_experts": 8}  # where the release chooses groups of experts
LAYERS_BEFORE = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")  # counts of the first layers
TINY_TOWER = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
    "patch_size": 4, "image_size": 16, "fullatt_block_indexes": [0], "num_key_value_heads": 2,
    "position_embedding_size": 16,
}  # fmt: skip
TOWER = ("visual", "vision", "multi_modal_projector", "embed_vision", "audio")  # in names that a trial leaves out


@dataclass(frozen=True)
class Outcome:
    """What came of a trial. why: the error if the release was refused"""

    result: str
    why: str = ""


def text_of(config: Config) -> Config:
    """Returns the part of a config that the text model has."""
    inner: Config = config.get("text_config", config)
    return inner


def cut(release: Release) -> Config:
    """Returns the release's config with small sizes, and with the layers that are kept."""
    whole: Config = json.loads(json.dumps(dict(release.config)))
    text = text_of(whole)
    count, heads, kv = text["num_hidden_layers"], text["num_attention_heads"], text.get("num_key_value_heads")
    for name, size in SIZES.items():
        if text.get(name):
            text[name] = size
    text["pad_token_id"] = 0  # the default of some classes is beyond the small vocabulary
    if text["model_type"] == "qwen3_vl_moe_text":  # its stacked experts are transposed, so none may be square
        text["moe_intermediate_size"] = 384
    if text.get("n_group", 1) > 1:
        text |= GROUPS
    for name, value in text.items():
        if isinstance(value, list) and len(value) == count:
            text[name] = [value[layer] for layer in release.kept]
        if name in LAYERS_BEFORE and value:
            text[name] = sum(layer < value for layer in release.kept)
    if pattern := text.get("hybrid_override_pattern"):
        text["hybrid_override_pattern"] = "".join(pattern[layer] for layer in release.kept)
    text["num_hidden_layers"] = len(release.kept)
    if kv is not None:
        text["num_key_value_heads"] = 4 if kv == heads else 1 if kv == 1 else 2
    if text.get("num_global_key_value_heads"):
        text["num_global_key_value_heads"] = 1
    if text.get("head_dim"):
        text["head_dim"] = 64
    for name in ("mamba_n_groups", "n_groups"):
        if text.get(name, 1) > 1:
            text[name] = 2
    for name in ("rope_parameters", "rope_scaling"):
        _cut_rope(text.get(name), head_dim_of(text), text.get("partial_rotary_factor") or 1.0)
    if "vision_config" in whole:
        of_tower = whole["vision_config"]
        of_tower |= {name: size for name, size in TINY_TOWER.items() if name in of_tower or name not in ("head_dim",)}
        of_tower["out_hidden_size"] = text["hidden_size"]
    return whole


def _cut_rope(rope: Config | None, head_dim: int, part: float) -> None:
    for one in (rope or {}, *(value for value in (rope or {}).values() if isinstance(value, dict))):
        if "original_max_position_embeddings" in one:
            one["original_max_position_embeddings"] = 64
        for name in ("long_factor", "short_factor"):
            if name in one:
                one[name] = one[name][: int(head_dim * part) // 2]
        if "mrope_section" in one:
            pairs = int(head_dim * one.get("partial_rotary_factor", part)) // 2
            one["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def head_dim_of(text: Config) -> int:
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def tensors_of(release: Release, config: Config, seed: int = 0) -> State:
    """Draws the release's tensors in bfloat16, under the names of the hub."""
    text, generator = text_of(config), torch.Generator().manual_seed(seed)
    inner = text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts") or 0
    sizes = sizes_of(text, head_dim_of(text))
    if text["model_type"] == "lfm2":  # the config states another size than the MLPs have
        sizes["i"] = 256
    names = {f"{release.prefix}{'embeddings' if release.prefix == 'backbone.' else 'embed_tokens'}.weight": "v h"}
    names[release.prefix + LAST_NORM.get(text["model_type"], "norm.weight")] = "h"
    names |= {release.head: "v h"} if release.head else {}
    names |= {release.prefix + name: shape for name, shape in release.outside.items()}
    for at, layer in enumerate(release.layers):
        names |= {f"{release.prefix}layers.{at}.{name}": shape for name, shape in layer.items()}
    own = text_of(dict(release.config))["num_hidden_layers"]
    for name, shape in release.beside.items():
        names[name.replace(f".layers.{own}.", f".layers.{len(release.kept)}.")] = shape
    found: State = {}
    for name, shape in names.items():
        every = range(inner) if "{}" in name else (0,)
        found |= {name.format(one): _drawn(name, shape_of(shape, sizes), generator) for one in every}
    return found


LAST_NORM = {"lfm2": "embedding_norm.weight", "lfm2_moe": "embedding_norm.weight", "nemotron_h": "norm_f.weight"}
AROUND_ONE = ("norm.weight", "layernorm.weight", "norm_1.weight", "norm_2.weight", "norm_f.weight", "router.scale",
              "per_expert_scale", "layer_scalar", "norm1.weight", "norm_weight", ".D")  # fmt: skip


def _drawn(name: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    numbers = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        numbers = numbers.abs().log1p()
    elif name.endswith(AROUND_ONE) or "norm" in name.rsplit(".", 2)[-2]:
        numbers = 1 + 0.1 * numbers
    else:
        numbers = numbers * (0.3 if len(shape) == 1 else 0.08)
    return numbers.to(torch.bfloat16)


def write(folder: Path, config: Config, state: State) -> Path:
    """Writes a checkpoint in two shards with an index, as the hub has it."""
    folder.mkdir(parents=True)
    names, shards = sorted(state), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    places = {name: shards[at * 2 >= len(names)] for at, name in enumerate(names)}
    for shard in shards:
        own = {name: state[name].clone().contiguous() for name, place in places.items() if place == shard}
        save_file(own, folder / shard, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in _tokenizer().items():
        (folder / name).write_text(content)
    return folder


@cache
def _tokenizer() -> dict[str, str]:
    tokenizer = byte_level_tokenizer()
    settings = {"eos_token": tokenizer.eos_token, "chat_template": tokenizer.chat_template}
    return {"tokenizer.json": tokenizer.backend_tokenizer.to_str(), "tokenizer_config.json": json.dumps(settings)}


def try_form(release: Release, form: str, folder: Path) -> Outcome:
    """Tries a release in a form. Raises AssertionError if it is served with wrong logits."""
    config: Config = {"architectures": [release.architecture], **release.config}
    if not release.refused:
        spec_from_config(config)  # in its own sizes
        config = {"architectures": [release.architecture], **cut(release)}
    else:
        return _refused(config)
    state = tensors_of(release, config)
    stored, numbers, quantization = in_form(
        state, form, release.plain, transposed=config["model_type"] in ("qwen3_vl_moe",)
    )
    settings = {**config, **({"quantization_config": quantization} if quantization else {})}
    try:
        found = _served(write(folder / "tried", settings, stored))
    except CheckpointError as error:
        return Outcome(REFUSED, str(error).replace(str(folder), "…"))
    own = {name: number.float() for name, number in numbers.items() if _is_of_text(name, release)}
    whole = write(folder / "whole", config, own)
    (prompt,) = prompts_of([LENGTH])
    expected = transformers_logits(release, whole, prompt) if form == PLAIN else logits_of(whole, prompt)
    torch.testing.assert_close(found, expected, atol=2e-4 * float(expected.abs().max()), rtol=0)
    return Outcome(SERVED)


def _is_of_text(name: str, release: Release) -> bool:
    """Returns whether a tensor belongs to the text model, not to a tower or to layers that draft."""
    drafts = f".layers.{len(release.kept)}."
    return name not in release.beside and drafts not in name


def _refused(config: Config) -> Outcome:
    try:
        spec_from_config(config)
    except CheckpointError as error:
        return Outcome(REFUSED, str(error))
    return Outcome(SERVED)


def _served(folder: Path) -> Tensor:
    """Answers a request by a runner, and returns the logits of the prompt."""
    (prompt,) = prompts_of([LENGTH])
    spec = spec_from_config(read_config(folder))
    decoder = Decoder(spec, load(folder, spec, torch.float32, CPU, invariant=True), MAX_SEQ_LEN)
    bench = RunnerBench(decoder, pages=12)
    bench.send(m.Submit(1, pack_u32(prompt), m.Sampling(ANSWER, temperature=0.0, ignore_eos=True)))
    bench.drain()
    answers, ends = bench.received()
    logits = all_logits(decoder, cache_for(decoder, tokens=64), [prompt], chunk=LENGTH)[0]
    assert len(answers[1]) == ANSWER and set(ends) == {1}
    assert answers[1][0] == int(logits[-1].argmax()), "the runner answers with the decoder's tokens"
    return logits


def logits_of(folder: Path, prompt: list[int]) -> Tensor:
    decoder = decoder_of(folder)
    return all_logits(decoder, cache_for(decoder, tokens=64), [prompt], chunk=LENGTH)[0]


@torch.no_grad()
def transformers_logits(release: Release, folder: Path, prompt: list[int]) -> Tensor:
    """Returns transformers' logits, whose loader must know all tensors of the text model, and lack none."""
    transformers.logging.set_verbosity_error()
    kind: Any = getattr(transformers, release.architecture)
    model, loading = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        strange = [str(name) for name in loading[what] if not any(part in str(name) for part in TOWER)]
        assert not strange, f"{what} of {release.architecture}: {strange[:5]}"
    logits: Tensor = model.eval()(torch.tensor([prompt])).logits[0]
    return logits.float()


def try_gguf(release: Release, mix: str, folder: Path) -> Outcome:
    """Tries the release's GGUF file with a mix of types. Raises AssertionError if it is served with wrong logits."""
    folder.mkdir(parents=True)
    written = write_gguf(release.gguf, folder, MIXES[mix])
    try:
        found = _served(resolve(str(written.file)))
    except CheckpointError as error:
        return Outcome(REFUSED, str(error).replace(str(folder), "…"))
    (prompt,) = prompts_of([LENGTH])
    expected = logits_of(written.reference, prompt)
    torch.testing.assert_close(found, expected, atol=2e-4 * float(expected.abs().max()), rtol=0)
    return Outcome(SERVED)


def try_head(release: Release, form: str, folder: Path) -> Outcome:
    """Tries to load the release's MTP head, which shares the embedding and the output head of its text model."""
    config = {"architectures": [release.architecture], **cut(release)}
    stored, _, quantization = in_form(tensors_of(release, config), form, release.plain, transposed=False)
    write(folder, {**config, **({"quantization_config": quantization} if quantization else {})}, stored)
    spec = spec_from_config(read_config(folder))
    try:
        served = load(folder, spec, torch.float32, CPU, invariant=True)
        head = load_head(folder, spec, served, AS_STORED, MAX_SEQ_LEN)
    except CheckpointError as error:
        return Outcome(REFUSED, str(error).replace(str(folder), "…"))
    assert len(head.decoder.weights.layers) == 1
    return Outcome(SERVED)


def try_pair(release: Release, types: str, folder: Path) -> Outcome:
    """Tries a GGUF file with its tower in a file beside it. types: of the tower's matrices"""
    checkpoint = rounded(seeing_checkpoint(release.seeing, folder / "whole"))
    text, _ = write_pair(checkpoint, folder / "files", types=types)
    found, (prompt,) = resolve(str(text)), prompts_of([LENGTH])
    torch.testing.assert_close(logits_of(found, prompt), logits_of(checkpoint, prompt), atol=1e-3, rtol=0)
    tower = tower_of(found, spec_from_config(read_config(found)).hidden_size, torch.float32, CPU)
    return Outcome(SERVED) if tower.weights is not None else Outcome(REFUSED, tower.missing)


def try_architecture(release: Release, name: str, folder: Path) -> Outcome:
    """Tries a GGUF file of an architecture that is not read."""
    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), name)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, 32), np.float32))
    finish(writer)
    try:
        resolve(str(folder / "model.gguf"))
    except CheckpointError as error:
        return Outcome(REFUSED, str(error).replace(str(folder), "…"))
    return Outcome(SERVED)


Case = tuple[str, str, str]  # the release, what is tried (a key of TRIALS), and the form or the mix of types
TRIALS = {"form": try_form, "head": try_head, "gguf": try_gguf, "pair": try_pair, "unread": try_architecture}
TOWER_TYPES = "Q8_0"


def cases() -> list[Case]:
    """Returns all that is tried."""
    return [
        (release.model, kind, one)
        for release in RELEASES
        for kind, all in (
            ("form", release.forms),
            ("head", release.heads),
            ("gguf", release.mixes),
            ("pair", (TOWER_TYPES,) * bool(release.seeing)),
            ("unread", release.unread),
        )
        for one in all
    ]


def label(case: Case) -> str:
    """Returns the name of a form as the page has it."""
    _, kind, one = case
    before = {
        "form": "",
        "head": "MTP head in ",
        "gguf": "GGUF ",
        "pair": "GGUF with mmproj in ",
        "unread": "GGUF of ",
    }[kind]
    return before + (FORMS[one].label if one in FORMS else one)


def try_case(case: Case, folder: Path) -> Outcome:
    model, kind, one = case
    return TRIALS[kind](BY_NAME[model], one, folder)
