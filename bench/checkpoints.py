"""Checkpoints with random weights in real shapes, for measuring speed: a tokenizer of 32,000 ids trained on Python's
standard library, tied embeddings, bfloat16. A checkpoint is generated once and cached. Libraries are imported only when
a checkpoint is generated. There is also one real model: the GGUF file that a package ships."""

import os
import shutil
import sysconfig
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB = 32_000
COMMON = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
SHAPES = {
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
    },
    "llama-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 32_768,
        "rope_theta": 5e5,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32_768,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        },
    },
    "gemma4-e2b": {
        "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "sliding_window": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 30.0, "max_position_embeddings": 32_768,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 32_768,
        "rope_theta": 1e4,
    },
}  # fmt: skip

LARGE = {  # shapes that exist only as GGUF files, written by bench/peers/random_gguf.py
    "llama-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
        "rope_theta": 5e5, "vocab_size": 128_256, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40_960,
        "rope_theta": 1e6, "vocab_size": 151_936, "tie_word_embeddings": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "gpt-oss-20b-8l": {  # 8 of gpt-oss-20b's 24 layers; other values are transformers' defaults
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 8,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201_088, "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {  # without YaRN
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10_944, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "max_position_embeddings": 163_840, "vocab_size": 102_400, "tie_word_embeddings": False,
    },
}  # fmt: skip

FILE = "file"  # the weight format of a user's GGUF file, whatever blocks it has
PACKAGED = {"smollm2": "q4_1"}  # real model → the weight format of its only GGUF file
ALL_SHAPES = (*SHAPES, *LARGE, *PACKAGED)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice" / "bench"


def checkpoint(shape: str, root: Path | None = None) -> Path:
    """Returns the folder of a checkpoint; generates the checkpoint if needed, which takes a minute.

    shape: a name in SHAPES, LARGE or PACKAGED. The folders of LARGE and PACKAGED have a config and a tokenizer, but no
    weights. The GGUF file of PACKAGED is linked beside the folder. Raises BenchError if this file cannot be fetched.
    """
    folder = (root or cache_folder()) / shape
    if not (folder / "done").exists():
        (_link if shape in PACKAGED else _make)(shape, folder)
        (folder / "done").touch()
    return folder


def gguf_model(text: str) -> Path:
    """Parses the path of a GGUF file, for argparse."""
    path = Path(text)
    if not path.is_file():
        raise ArgumentTypeError(f"{text} is not a file")
    return path


def chosen(args: Namespace, root: Path) -> Iterator[tuple[Path, str]]:
    """Yields the folder and the weights of each checkpoint that a command names: those of --file, if it is given, or
    else each of --shape in each of --weights.
    """
    if args.file:
        yield from ((of_file(file, root), FILE) for file in args.file)
    else:
        yield from ((checkpoint(shape, root), weights) for shape in args.shape for weights in args.weights)


def of_file(file: Path, root: Path | None = None) -> Path:
    """Returns the folder of a GGUF file of the user's, with its config and tokenizer. The file is linked beside the
    folder; its weights are called FILE.
    """
    folder = (root or cache_folder()) / file.stem
    _link_file(file.absolute(), folder, FILE)
    return folder


def _link(shape: str, folder: Path) -> None:
    from bench.client.server import BenchError
    from deploy.launcher.packaged_model import SMOLLM2, FetchError, fetched

    try:
        _link_file(fetched(SMOLLM2), folder, PACKAGED[shape])
    except FetchError as error:
        raise BenchError(str(error)) from error


def _link_file(file: Path, folder: Path, weights: str) -> None:
    from shared.gguf.translated import translated

    shutil.copytree(translated([file]), folder, dirs_exist_ok=True)
    link = folder.with_name(f"{folder.name}-{weights}.gguf")
    link.unlink(missing_ok=True)
    link.symlink_to(file)


def _make(shape: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    options: dict[str, Any] = COMMON | (SHAPES | LARGE)[shape]
    torch.manual_seed(0)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    if shape in SHAPES:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_tokenizer(folder.parent), eos_token="<|im_end|>")
    tokenizer.save_pretrained(folder)


def _tokenizer(root: Path) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    file = root / "tokenizer-32k.json"
    if file.exists():
        return Tokenizer.from_file(str(file))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    texts = (path.read_text("utf-8", "ignore") for path in sources if "site-packages" not in path.parts)
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(file))
    return tokenizer
