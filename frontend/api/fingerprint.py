"""What a frontend adds to a worker's fingerprint: how it makes prompts, and how it parses the output."""

from collections.abc import Mapping
from typing import Any

from frontend.output_parser.formats import ModelFormat
from frontend.text.tokenizer import Tokenizer
from shared.fingerprint import fingerprint_of

TEXT_VERSION = 3  # raise it with every change after which the same request may get another prompt or another answer


def text_fingerprint(
    tokenizer: Tokenizer, style: ModelFormat, defaults: Mapping[str, Any], specials_in_content: bool = False
) -> str:
    """Returns the frontend's part.

    defaults: the sampling fields of requests that set none
    specials_in_content: spellings of special tokens in messages make special tokens
    """
    facts = [tokenizer.hash, tokenizer.templates, tokenizer.named_tokens, tokenizer.eos_ids, style, defaults]
    return fingerprint_of([TEXT_VERSION, *facts, specials_in_content])


def combined(worker: str, text: str) -> str:
    """Returns the fingerprint that clients see, from the worker's and the frontend's part."""
    return fingerprint_of([worker, text])
