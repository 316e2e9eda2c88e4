"""Tiny random encoders in the layouts of published ones, written by transformers, and its results for them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = [
    "the",
    "river",
    "runs",
    "past",
    "old",
    "mill",
    "and",
    "stone",
    "bridge",
    "small",
    "boat",
    "waits",
    "there",
    "for",
    "evening",
    "light",
    "of",
    "a",
    "red",
    "house",
]
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


# GGUF files, as llama.cpp's converter writes them.

_BERT = {
    "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
}  # fmt: skip
_NOMIC = {
    "embeddings.word_embeddings": "token_embd", "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm", "emb_ln": "token_embd_norm", "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output", "norm1": "attn_output_norm", "norm2": "layer_output_norm", "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate", "mlp.fc2": "ffn_down", "self_attn.o_proj": "attn_output", "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
}  # fmt: skip
_MODERN = {
    "embeddings.tok_embeddings": "token_embd", "embeddings.norm": "token_embd_norm", "final_norm": "output_norm",
    "attn_norm": "attn_norm", "attn.Wqkv": "attn_qkv", "attn.Wo": "attn_output", "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up", "mlp.Wo": "ffn_down",
}  # fmt: skip
_GEMMA = {
    "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
GGUF_KINDS: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, Any]]] = {  # kind → architecture, names, values
    "bert": ("bert", _BERT, {"attention.layer_norm_epsilon": 1e-12}),
    "xlm-roberta": ("bert", _BERT, {"attention.layer_norm_epsilon": 1e-12}),
    "nomic_bert": ("nomic-bert", _NOMIC, {"attention.layer_norm_epsilon": 1e-12, "rope.freq_base": 1000.0}),
    "modernbert": ("modern-bert", _MODERN, {
        "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 160_000.0, "rope.freq_base_swa": 10_000.0,
        "attention.sliding_window": 6, "attention.sliding_window_pattern": 2,
    }),
    "embeddinggemma": ("gemma-embedding", _GEMMA, {
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1_000_000.0, "attention.sliding_window": 6,
        "attention.sliding_window_pattern": [True, False, True], "attention.key_length": 16,
        "attention.value_length": 16, "attention.head_count_kv": 1, "dense_2_feat_in": 48, "dense_2_feat_out": 64,
        "dense_3_feat_in": 64, "dense_3_feat_out": 32,
    }),
}  # fmt: skip


def gguf_of(folder: Path, file: Path, kind: str, pooling: int = 1, type: str = "F32") -> Path:
    """Writes the encoder in `folder` as a GGUF file. pooling: 1 mean, 2 cls; type: of the matrices of layers"""
    import gguf
    from gguf.quants import quantize
    from safetensors.torch import load_file

    architecture, names, values = GGUF_KINDS[kind]
    writer = gguf.GGUFWriter(str(file), architecture)
    common = {
        "context_length": POSITIONS, "embedding_length": 48, "block_count": 3, "feed_forward_length": 80,
        "attention.head_count": 3, "attention.causal": False, "pooling_type": pooling,
    }  # fmt: skip
    for name, value in {**common, **values}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[value.__class__](f"{architecture}.{name}", value)
    vocabulary = sorted(word_piece().get_vocab().items(), key=lambda pair: pair[1])
    texts = [text for text, _ in vocabulary] + [f"[unused{i}]" for i in range(VOCAB - len(vocabulary))]
    special = [text in SPECIAL or text.startswith("[unused") for text in texts]
    writer.add_tokenizer_model("bert")
    writer.add_token_list([
        text if is_special else text.removeprefix("##") if text.startswith("##") else f"▁{text}"
        for text, is_special in zip(texts, special, strict=True)
    ])  # fmt: skip
    writer.add_token_types([3 if one else 1 for one in special])
    writer.add_unk_token_id(1)
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        module, _, part = name.rpartition(".")
        layer = next((one for one in module.split(".") if one.isdecimal()), "")
        inner = module.partition(f"{layer}.")[2] if layer else module
        stored = f"blk.{layer}.{names[inner]}" if layer and inner in names else names.get(module, "")
        if not stored:
            if ".q_proj" not in name and ".k_proj" not in name and ".v_proj" not in name:
                continue
            if not name.endswith("q_proj.weight"):
                continue
            whole = load_file(folder / "model.safetensors")
            tensor = torch.cat([whole[name.replace("q_proj", f"{one}_proj")] for one in "qkv"])
            stored = f"blk.{layer}.attn_qkv"
        if stored == "position_embd":
            tensor = tensor[-POSITIONS:]
        if architecture == "gemma-embedding" and stored.endswith("norm"):
            tensor = tensor + 1
        numbers = tensor.float().numpy()
        kept = type if stored.startswith("blk.") and tensor.ndim == 2 and numbers.shape[1] % 32 == 0 else "F32"
        kind_of = gguf.GGMLQuantizationType[kept]
        data = numbers if kept == "F32" else quantize(numbers, kind_of)
        writer.add_tensor(f"{stored}.{part}", data, raw_dtype=kind_of)
    if architecture == "gemma-embedding":
        torch.manual_seed(4)
        for name, shape in (("dense_2", (64, 48)), ("dense_3", (32, 64))):
            writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
