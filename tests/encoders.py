"""Tiny random encoders in the layouts of published ones, written by transformers, and transformers' results for them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = "the river runs past old mill and stone bridge small boat waits there for evening light of a red house".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = 96
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 80,
    "initializer_range": 0.2,
}  # fmt: skip
POSITIONS = 40


def word_piece() -> PreTrainedTokenizerFast:
    """WordPiece as BERT has it: [CLS] a [SEP] b [SEP], where the second text has the token type 1."""
    pieces = [*SPECIAL, *WORDS, *"abcdefghijklmnopqrstuvwxyz", *(f"##{one}" for one in "abcdefghijklmnopqrstuvwxyz")]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    assert len(vocabulary) <= VOCAB
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(one, vocabulary[one]) for one in ("[CLS]", "[SEP]")],
    )  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    )


def _config(kind: str) -> Any:
    from transformers import models as families

    sizes = dict(SIZES)
    match kind:
        case "bert":
            return transformers.BertConfig(**sizes, max_position_embeddings=POSITIONS)
        case "roberta":
            return transformers.RobertaConfig(
                **sizes, max_position_embeddings=POSITIONS + 2, type_vocab_size=1, pad_token_id=1
            )
        case "xlm-roberta":
            return transformers.XLMRobertaConfig(
                **sizes, max_position_embeddings=POSITIONS + 2, type_vocab_size=1, pad_token_id=1, hidden_act="gelu"
            )
        case "distilbert":
            return transformers.DistilBertConfig(
                vocab_size=VOCAB, dim=48, n_layers=3, n_heads=3, hidden_dim=80, max_position_embeddings=POSITIONS,
                initializer_range=0.2,
            )  # fmt: skip
        case "nomic_bert":
            return families.nomic_bert.NomicBertConfig(**sizes, max_position_embeddings=POSITIONS)
        case "modernbert":
            return transformers.ModernBertConfig(
                **sizes, max_position_embeddings=POSITIONS, local_attention=6, global_attn_every_n_layers=2,
                pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
            )  # fmt: skip
        case "embeddinggemma":
            return transformers.Gemma3TextConfig(
                **sizes, num_key_value_heads=1, head_dim=16, max_position_embeddings=POSITIONS, sliding_window=6,
                use_bidirectional_attention=True, query_pre_attn_scalar=16, pad_token_id=0, bos_token_id=2,
                eos_token_id=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            )  # fmt: skip
        case "qwen3":
            return transformers.Qwen3Config(
                **sizes, num_key_value_heads=1, head_dim=16, max_position_embeddings=POSITIONS, is_causal=False
            )
        case "llama":
            return transformers.LlamaConfig(
                **sizes, num_key_value_heads=1, max_position_embeddings=POSITIONS, is_causal=False
            )
    raise AssertionError(kind)


KINDS = ("bert", "roberta", "xlm-roberta", "distilbert", "nomic_bert", "modernbert", "embeddinggemma", "qwen3", "llama")
WITH_HEADS = ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert")


def _spread(model: torch.nn.Module) -> None:
    """Gives norms and biases random values, so that a test sees whether they are used."""
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("weight") else 0.0, std=0.2)


def encoder(
    folder: Path, kind: str = "bert", *, pooling: str = "mean", normalized: bool = True, most: int = 0,
    dense: tuple[int, str] | None = None, lower: bool = False, stored: Callable[[Path], None] | None = None,
) -> Path:  # fmt: skip
    """Writes an encoder and sentence-transformers' files.

    pooling: the name of a mode; most: its max_seq_length; dense: outputs and activation class of a linear after pooling
    """
    torch.manual_seed(1)
    model = transformers.AutoModel.from_config(_config(kind)).eval()
    _spread(model)
    model.save_pretrained(folder)
    word_piece().save_pretrained(folder)
    paths = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalized else [])]
    _write(folder / "modules.json", [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(paths)
    ])  # fmt: skip
    _write(folder / "1_Pooling" / "config.json", {
        "word_embedding_dimension": 48, "pooling_mode_cls_token": pooling == "cls",
        "pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_max_tokens": pooling == "max",
        "pooling_mode_lasttoken": pooling == "lasttoken", "include_prompt": True,
    })  # fmt: skip
    if dense:
        _write(folder / "2_Dense" / "config.json", {
            "in_features": 48, "out_features": dense[0], "bias": True,
            "activation_function": f"torch.nn.modules.activation.{dense[1]}",
        })  # fmt: skip
        torch.manual_seed(2)
        tensors = {"linear.weight": torch.randn(dense[0], 48), "linear.bias": torch.randn(dense[0])}
        from safetensors.torch import save_file

        save_file(tensors, folder / "2_Dense" / "model.safetensors")
    _write(folder / "sentence_bert_config.json", {"max_seq_length": most or None, "do_lower_case": lower})
    return folder


def classifier(folder: Path, kind: str = "bert", labels: int = 1, names: tuple[str, ...] = ()) -> Path:
    """Writes an encoder with a classification head."""
    config = _config(kind)
    config.num_labels = labels
    if names:
        config.id2label = dict(enumerate(names))
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    _spread(model)
    model.save_pretrained(folder)
    word_piece().save_pretrained(folder)
    return folder


def hidden_states(folder: Path, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    """Returns the hidden states of transformers, [T, H] float32, where every token sees all others."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    given: dict[str, Any] = {} if types is None else {"token_type_ids": torch.tensor([types])}
    if getattr(model.config, "is_causal", True) is False:  # transformers has no such switch: it takes a mask instead
        given["attention_mask"] = torch.zeros(1, 1, len(ids), len(ids))
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([ids]), **given).last_hidden_state[0]
    return states


def class_logits(folder: Path, ids: list[int], types: list[int] | None = None) -> torch.Tensor:
    """Returns the logits of transformers' classifier, [labels] float32."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    given: dict[str, Any] = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), **given).logits[0]
    return logits


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
