"""Writes a checkpoint folder with the shapes of a real model.

Its weights are random and made on the device. Its tokenizer has as many tokens as the model.
"""

import json
import os
from itertools import chain, product
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from bench.gpu.environment import Environment
from bench.gpu.shapes import CONFIGS

STD = 0.02
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
DROP = Path("/proc/sys/vm/drop_caches")


def checkpoint(env: Environment, model: str) -> Path:
    """Returns the checkpoint folder of a model. The first call writes it, which takes seconds and gigabytes."""
    folder = env.folder / model
    if not (folder / "done").exists():
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(CONFIGS[model])))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        tokenizer(CONFIGS[model]["vocab_size"]).save(str(folder / "tokenizer.json"))
        save_file(_tensors(env, model), folder / "model.safetensors", {"format": "pt"})
        (folder / "done").touch()
    return folder


def tokenizer(size: int) -> Tokenizer:
    """Returns a byte-level tokenizer of `size` tokens: all bytes, then words of two letters, then words of four."""
    vocab = {token: id for id, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [(one, other) for one in LETTERS for other in LETTERS]
    words = [one + other for one, other in pairs]
    merges = []
    for one, other in chain(pairs, product(words, repeat=2)):
        if len(vocab) == size:
            break
        vocab[one + other] = len(vocab)
        merges.append((one, other))
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _tensors(env: Environment, model: str) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint in host memory, with the names that transformers uses."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**CONFIGS[model])
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=env.dtype).state_dict()
    generator = env.generator()
    still = 0.0 if config.model_type.startswith("gemma") else 1.0  # the norm weight that leaves values unscaled

    def make(name: str, shape: torch.Size) -> Tensor:
        tensor = torch.empty(shape, dtype=env.dtype, device=env.device)
        return (tensor.fill_(still) if "norm" in name else tensor.normal_(0, STD, generator=generator)).cpu()

    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: make(name, meta.shape) for name, meta in shapes.items() if name not in tied}


def forget(env: Environment, folder: Path) -> str:
    """Drops as much of the page cache as this process may. Returns a description of what was dropped."""
    os.sync()
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if not env.cuda:  # the CPU only tests the benchmark, so other programs' cached files stay
        return "cold: the checkpoint's dropped"
    try:
        DROP.write_text("3")
    except OSError:
        return "cold: the checkpoint's dropped, the rest may not be"
    return "cold: all dropped"
