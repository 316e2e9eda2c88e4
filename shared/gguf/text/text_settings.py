"""Makes tokenizer_config.json and generation_config.json from the metadata of a GGUF file."""

from typing import Any

from shared.gguf.container import Container
from shared.gguf.errors import GgufError
from shared.gguf.text.tokenizer import Vocabulary

Json = dict[str, Any]

TEMPLATE = "tokenizer.chat_template"
NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
ENDS = ("eos", "eot", "eom")  # the tokens that a file names as ends: of a text, a turn, a message
# Added tokens with these names end a text even if the file does not say so, as in llama.cpp: files of Phi-3 and older
# files of Gemma do not name the end of a turn.
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
    "<turn|>", "<|tool_response>",  # Gemma 4
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
# gpt-oss ends a turn with a token of TURN_ENDS, and each message of a turn with MESSAGE_END, whatever the file names.
TURN_ENDS, MESSAGE_END = ("<|return|>", "<|call|>"), "<|end|>"
SAMPLING = {  # name in GGUF → name in generation_config.json
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip

# general.basename → sampling parameters that the authors recommend on the model's page, but not in the files.
RECOMMENDED: dict[str, dict[str, float]] = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}


def tokenizer_config_of(vocabulary: Vocabulary) -> Json:
    """Returns tokenizer_config.json: named tokens and chat templates."""
    tokens = {name: vocabulary.named(stored) for stored, name in NAMES.items()}
    named: Json = {name: vocabulary.texts[token] for name, token in tokens.items() if token is not None}
    if templates := _templates(vocabulary.container):
        only_default = templates.keys() == {"default"}
        listed = [{"name": name, "template": source} for name, source in templates.items()]
        named["chat_template"] = templates["default"] if only_default else listed
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | named


def _templates(container: Container) -> dict[str, str]:
    found = {}
    for key in container.metadata:
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}."):
            found[key.removeprefix(TEMPLATE).removeprefix(".") or "default"] = container.text(key)
    return found


def generation_config_of(vocabulary: Vocabulary) -> Json:
    """Returns generation_config.json: the ids that end a text, and recommended sampling parameters.

    Raises GgufError when the file names no end.
    """
    container = vocabulary.container
    ends = [token for name in ENDS if (token := vocabulary.named(name)) is not None]
    added = {vocabulary.texts[i]: i for i in vocabulary.added()}
    ends += [i for text, i in added.items() if text in END_TEXTS]
    if all(text in added for text in TURN_ENDS):
        ends = [i for i in ends if i != added.get(MESSAGE_END)] + [added[text] for text in TURN_ENDS]
    if not ends:
        raise GgufError(f"{container.name} has no tokenizer.ggml.eos_token_id")
    settings: Json = {"eos_token_id": list(dict.fromkeys(ends))}
    if (bos := vocabulary.named("bos")) is not None:
        settings["bos_token_id"] = bos
    sampling = RECOMMENDED.get(container.text("general.basename", "").lower(), {}) | {
        name: container.number(f"general.sampling.{stored}")
        for stored, name in SAMPLING.items()
        if f"general.sampling.{stored}" in container.metadata
    }
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    return settings | ({"do_sample": True, **sampling} if sampling else {})
