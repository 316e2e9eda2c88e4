"""The frontend's part of the fingerprint: a hash of how prompts are made, and of how the output is parsed."""

from collections.abc import Mapping
from typing import Any

from frontend.output_parser.formats import ModelFormat
from frontend.text.tokenizer import Tokenizer
from shared.fingerprint import fingerprint_of

TEXT_VERSION = 3  # raise it with every change that may alter the prompt or the answer of an unchanged request


def text_fingerprint(
    tokenizer: Tokenizer, style: ModelFormat, defaults: Mapping[str, Any], specials_in_content: bool = False
) -> str:
    """Returns the frontend's part of the fingerprint.

    defaults: the sampling parameters of a request that sets none
    specials_in_content: whether text like <|im_end|> in a message becomes a special token
    """
    facts = [tokenizer.hash, tokenizer.templates, tokenizer.named_tokens, tokenizer.eos_ids, style, defaults]
    return fingerprint_of([TEXT_VERSION, *facts, specials_in_content])


def combined(worker: str, text: str) -> str:
    """Returns the fingerprint that clients see. worker, text: the worker's part and the frontend's part"""
    return fingerprint_of([worker, text])
