"""Makes what only encoders have in the files of a checkpoint: config.json, linears after pooling, and their tokenizers.

The tokenizers are WordPiece and Unigram.
"""

import base64
from typing import TYPE_CHECKING, Any

from shared.gguf.config_dense import gemma3, whole_heads
from shared.gguf.config_values import Config, Hyperparameters
from shared.gguf.container import Container
from shared.gguf.naming import GgufError

if TYPE_CHECKING:
    from shared.gguf.tokenizer import Vocabulary

DENSE = ("dense_2", "dense_3")  # the linears after pooling, in their order
GLOBAL_EVERY = 3  # ModernBERT: every third layer attends to all tokens
SPACE, CONTINUES = "▁", "##"  # how a file spells the beginning of a word; how WordPiece spells its other parts
UNKNOWN_CHARS = 100  # a longer word is one unknown token, as in BERT


def bert(values: Hyperparameters, config: Config) -> Config:
    """BERT, RoBERTa and XLM-RoBERTa. The converter cuts the positions that are not used, and drops the pooler."""
    return {
        "max_position_embeddings": _rows(values, "position_embd.weight", config["max_position_embeddings"]),
        "type_vocab_size": _rows(values, "token_types.weight", 0),
        "hidden_act": "gelu",
    }


def nomic_bert(values: Hyperparameters, config: Config) -> Config:
    types = {"type_vocab_size": _rows(values, "token_types.weight", 0), "hidden_act": "silu"}
    return whole_heads(values, config) | types


def modern_bert(values: Hyperparameters, config: Config) -> Config:
    theta = config["rope_theta"]
    if config["rope_scaling"]:
        raise GgufError(f"{values.container.name}: rotary scaling is not supported for ModernBERT")
    return whole_heads(values, config) | {
        "local_attention": values.integer("attention.sliding_window"),
        "global_attn_every_n_layers": values.integer("attention.sliding_window_pattern", GLOBAL_EVERY),
        "global_rope_theta": theta,
        "local_rope_theta": values.number("rope.freq_base_swa", 10_000.0),
        "hidden_activation": "gelu",
    }


def gemma_embedding(values: Hyperparameters, config: Config) -> Config:
    for name in DENSE:
        for part in ("feat_in", "feat_out"):
            values.key(f"{name}_{part}")
    return gemma3(values, config) | {"use_bidirectional_attention": True}


def dense_files(container: Container) -> dict[str, Any]:
    """Returns the configs of the linears after pooling, by their paths."""
    architecture, found = container.text("general.architecture"), {}
    for name in DENSE:
        outputs = container.integer(f"{architecture}.{name}_feat_out", 0)
        if outputs:
            inputs = container.integer(f"{architecture}.{name}_feat_in")
            sizes = {"in_features": inputs, "out_features": outputs, "bias": False}
            found[f"{name}/config.json"] = {**sizes, "activation_function": "torch.nn.modules.linear.Identity"}
    return found


def _rows(values: Hyperparameters, name: str, otherwise: int) -> int:
    tensor = values.container.tensors.get(name)
    return otherwise if tensor is None else tensor.shape[0]


# Tokenizers.


def word_piece(vocabulary: "Vocabulary") -> dict[str, Any]:
    """BERT's tokenizer. The converter marks the beginnings of words instead of their other parts."""
    container, special = vocabulary.container, set(vocabulary.added())
    texts = [
        text if i in special else text.removeprefix(SPACE) if text.startswith(SPACE) else CONTINUES + text
        for i, text in enumerate(vocabulary.texts)
    ]
    pieces = {text: i for i, text in enumerate(texts)}
    if len(pieces) != len(texts):
        raise GgufError(f"{container.name}: tokenizer.ggml.tokens holds a token twice")
    unknown = vocabulary.named("unknown")
    return {
        "added_tokens": _added(vocabulary, texts),
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _around(vocabulary, "[CLS]", "[SEP]", type_of_second=1, between=1),
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]" if unknown is None else texts[unknown],
            "continuing_subword_prefix": CONTINUES, "max_input_chars_per_word": UNKNOWN_CHARS, "vocab": pieces,
        },
    }  # fmt: skip


def unigram(vocabulary: "Vocabulary") -> dict[str, Any]:
    """XLM-RoBERTa's tokenizer: a Unigram model of SentencePiece."""
    container, texts = vocabulary.container, vocabulary.texts
    scores: list[float] = container.entries("tokenizer.ggml.scores", float)
    charsmap = bytes(container.entries("tokenizer.ggml.precompiled_charsmap", int, []))
    unknown = vocabulary.named("unknown")
    if len(scores) != len(texts) or unknown is None:
        raise GgufError(f"{container.name}: a Unigram tokenizer needs a score for each token, and an unknown token")
    parts: list[dict[str, Any]] = []
    if charsmap:
        parts.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if container.flag("tokenizer.ggml.remove_extra_whitespaces", True):
        parts.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    spaces = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    return {
        "added_tokens": _added(vocabulary, texts),
        "normalizer": {"type": "Sequence", "normalizers": parts},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
        "post_processor": _around(vocabulary, "<s>", "</s>", type_of_second=0, between=2),
        "decoder": spaces,
        "model": {
            "type": "Unigram", "unk_id": unknown, "byte_fallback": False,
            "vocab": [[text, score] for text, score in zip(texts, scores, strict=True)],
        },
    }  # fmt: skip


def _added(vocabulary: "Vocabulary", texts: list[str]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": i, "content": texts[i], **flags} for i in vocabulary.added()]


def _around(vocabulary: "Vocabulary", first: str, last: str, *, type_of_second: int, between: int) -> dict[str, Any]:
    """Returns the post-processor, which puts tokens before and after a text, and between the texts of a pair.

    first, last: these tokens, if the file names none; between: how many tokens stand between two texts
    """
    places = {text: i for i, text in enumerate(vocabulary.texts)}
    named = (vocabulary.named("cls"), vocabulary.named("bos"), places.get(first))
    ends = (vocabulary.named("seperator"), vocabulary.named("eos"), places.get(last))
    before = next((one for one in named if one is not None), None)
    after = next((one for one in ends if one is not None), None)
    if before is None or after is None:
        raise GgufError(f"{vocabulary.container.name} names no tokens that stand before and after a text")
    opening, closing = vocabulary.texts[before], vocabulary.texts[after]

    def token(text: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": kind}}

    single = [token(opening, 0), {"Sequence": {"id": "A", "type_id": 0}}, token(closing, 0)]
    gap = [token(closing, 0)] * (between - 1)
    second = [{"Sequence": {"id": "B", "type_id": type_of_second}}, token(closing, type_of_second)]
    tokens = {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in ((opening, before), (closing, after))}
    return {
        "type": "TemplateProcessing", "single": single, "pair": [*single, *gap, *second], "special_tokens": tokens
    }  # fmt: skip
