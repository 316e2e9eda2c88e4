"""--speculative-config with eagle3: the head is loaded from its checkpoint, or the start ends with one sentence."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.model_runner.harness import batch_invariant_decoder
from tests.worker.spec_decode.eagle_heads import EAGLES, IDS, WEIGHTS, Eagle
from worker.checkpoint.checkpoint import CheckpointError
from worker.engine.build import Engine, load_engine
from worker.spec_decode.eagle import read_eagle_config
from worker.spec_decode.head_drafter import HeadDrafter

Tensors = dict[str, torch.Tensor]


def loaded(served: Path, head: Path, **settings: Any) -> Engine:
    config = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    worker = WorkerConfig(
        device="cpu", kv_cache_gb=0.01, speculation="ngram", max_draft_tokens=3, speculative_config=config, **settings
    )
    return load_engine(ModelConfig(model=str(served), max_seq_len=64), worker)


@pytest.fixture(scope="module")
def flat(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Eagle(EAGLES["flat"], checkpoints("llama")).save(tmp_path_factory.mktemp("eagles") / "flat")


@pytest.mark.parametrize("quantization", ["auto", "int4"])
def test_head_of_a_checkpoint_of_its_own_drafts(quantization: str, flat: Path, checkpoints: Checkpoints) -> None:
    engine = loaded(checkpoints("llama"), flat, quantization=quantization)
    speculation = engine.scheduler.speculation
    assert speculation is not None and isinstance(speculation.proposer, HeadDrafter)
    assert engine.runner.hidden_reader is speculation.proposer
    head = speculation.proposer.head
    assert (head.layers, head.decoder.max_positions) == ((1, 0, 2), 64)
    assert engine.weights is not None and head.decoder.weights.embed is engine.weights.embed, "it has none of its own"


def test_embedding_that_is_a_copy_of_the_served_models_is_not_kept(
    flat: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    served = batch_invariant_decoder(checkpoints("llama"), torch.float32).weights.embed.table()
    for copied in (True, False):
        folder = Path(shutil.copytree(flat, tmp_path / str(copied)))
        embedding = served.clone() if copied else served + 1
        save_file(load_file(flat / WEIGHTS) | {"embed_tokens.weight": embedding}, folder / WEIGHTS)
        engine = loaded(checkpoints("llama"), folder)
        assert engine.weights is not None and engine.scheduler.speculation is not None
        drafter = engine.scheduler.speculation.proposer
        assert isinstance(drafter, HeadDrafter)
        assert (drafter.head.decoder.weights.embed is engine.weights.embed) == copied


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(one) for one in list(tensors) if one.startswith(name)].clear()


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).clone()})


def added(id: int, to: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda d2t: d2t.index_fill(0, torch.tensor([id]), to - id)


SPOILED: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "no layer": (without("midlayer."), "has no EAGLE-3 head: no tensor's name begins with midlayer. or layers.0."),
    **{
        name: (without(f"{name}.weight"), f"tensor {name}.weight is missing")
        for name in (
            "fc", "norm", "lm_head", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.self_attn.q_proj",
            "midlayer.mlp.down_proj", "midlayer.post_attention_layernorm",
        )
    },
    "narrow fc": (changed("fc.weight", lambda fc: fc[:, :-64]), "tensor fc.weight has shape [64, 128]"),
    "plain attention": (
        changed("midlayer.self_attn.k_proj.weight", lambda k: k[:, :64]), "k_proj.weight has shape [48, 64]"
    ),
    "unknown tensor": (lambda all: all.update({"mask_hidden": torch.ones(3)}), "mask_hidden does not belong"),
    "no d2t": (without("d2t"), "tensor d2t is missing"),
    "short d2t": (changed("d2t", lambda d2t: d2t[1:]), "tensor d2t must be 200 whole numbers"),
    "d2t of floats": (changed("d2t", lambda d2t: d2t.float()), "tensor d2t must be 200 whole numbers"),
    "d2t beyond the vocabulary": (changed("d2t", added(7, VOCAB)), f"does not give 200 different ids below {VOCAB}"),
    "d2t below zero": (changed("d2t", added(7, -1)), "does not give 200 different ids"),
    "d2t with the same id twice": (
        changed("d2t", lambda d2t: added(0, int(d2t[1]) + 1)(d2t)), "does not give 200 different ids"
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_head_whose_tensors_cannot_be_used_is_refused_in_a_sentence(
    how: str, flat: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    spoil, words = SPOILED[how]
    folder = Path(shutil.copytree(flat, tmp_path / "spoiled"))
    tensors = load_file(flat / WEIGHTS)
    spoil(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError) as refused:
        loaded(checkpoints("llama"), folder)
    assert str(refused.value).startswith("the draft model (--speculative-config) cannot be used")
    assert words in str(refused.value) and "\n" not in str(refused.value)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 500}, "it has a vocabulary of 500 tokens, and the served model one of 512"),
    ({"hidden_size": 32}, "has the hidden size 32, and the served model has 64: then it needs embed_tokens.weight"),
    ({"target_hidden_size": 96}, "it reads hidden states of size 96, and the served model's have 64"),
    ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported"),
    ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported"),
    ({"draft_vocab_size": 513}, "draft_vocab_size must be a number from 1 to 512, and is 513"),
    ({"draft_vocab_size": "200"}, "draft_vocab_size must be a number from 1 to 512, and is '200'"),
    ({"eagle_config": [1]}, "eagle_config must be an object"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false is not supported"),
    ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false, and is 'yes'"),
    ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc and fc_norm exclude each other"),
    ({IDS: "2"}, f"{IDS} must be a list of whole numbers"),
    ({IDS: [2, True]}, f"{IDS} must be a list of whole numbers"),
    *(({IDS: ids}, f"{IDS} {ids} are not different layers of the served model, which has 3")
      for ids in ([], [2, 2, 3], [1, 2, 3], [0, 1], [4])),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_head_whose_config_does_not_fit_is_refused_in_a_sentence(
    settings: dict[str, Any], words: str, flat: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(flat, tmp_path / "spoiled"))
    stated = json.loads((flat / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | settings))
    with pytest.raises(CheckpointError) as refused:
        loaded(checkpoints("llama"), folder)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("ids", "layers"),
    [(None, (1, 3, 4)), ([1, 3, 4], (1, 3, 4)), ([2, 4, 5], (1, 3, 4)), ([8, 3], (7, 2)), ([1], (1,))],
)
def test_layers_are_named_by_their_outputs_or_by_their_inputs(
    ids: list[int] | None, layers: tuple[int, ...], flat: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(flat, tmp_path / "renamed"))
    stated = json.loads((flat / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {"eagle_config": None, IDS: ids}))
    spec = batch_invariant_decoder(checkpoints("llama"), torch.float32).spec
    assert read_eagle_config(folder, replace(spec, layers=spec.layers[:1] * 8)).read == layers
