"""A copy of a tokenizer in which added tokens have secret names, so that untrusted text cannot spell them.

Apart from those names, the copy encodes text as the original does: same rules, same vocabulary, same ids.
"""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer as Engine

from frontend.errors import BadRequest, Unprocessable
from frontend.text.spellings import Spellings


class AliasedEngine:
    """Encodes texts so that an added token stands only where a trusted author wrote it.

    engine: the tokenizer
    spellings: the added tokens to rename; all of them are in the tokenizer's vocabulary

    Raises Unprocessable if the tokenizer cannot be copied with renamed tokens.
    """

    def __init__(self, engine: Engine, spellings: Iterable[str]) -> None:
        secret = secrets.token_hex(16)
        self._aliases = {one: f"q{secret}q{engine.token_to_id(one):x}q" for one in spellings}
        self._spellings = Spellings(self._aliases)
        self._engine = Engine.from_str(msgspec.json.encode(_renamed(engine, self._aliases)).decode())
        find = self._engine.token_to_id
        if any(find(alias) != engine.token_to_id(one) for one, alias in self._aliases.items()):
            raise Unprocessable(
                "the text has the spelling of a special token, which this model's tokenizer cannot encode as text",
                param="messages", code="unsupported_content",
            )  # fmt: skip

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Returns the ids of a text with marks (see Spellings). A spelling after a mark is encoded as plain text."""
        return self.encode_plain([self._spellings.replaced(text, self._aliases, mark)], False)[0]

    def encode_plain(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool
    ) -> list[list[int]]:
        """Returns the ids of texts, or of pairs of texts, in which no added token is recognized.

        Raises BadRequest for text that is not Unicode.
        """
        try:
            encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:  # a lone surrogate, which UTF-8 cannot express
            raise BadRequest("the text is not valid Unicode") from error
        return [one.ids for one in encodings]


def _renamed(engine: Engine, aliases: dict[str, str]) -> dict[str, Any]:
    """Returns the tokenizer's description (the content of tokenizer.json), with tokens renamed by `aliases`."""
    state: dict[str, Any] = msgspec.json.decode(engine.to_str())
    model = state["model"]
    for entry in state["added_tokens"]:
        if alias := aliases.get(entry["content"]):
            entry |= {"content": alias, "single_word": False}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {aliases.get(token, token): id for token, id in model["vocab"].items()}
    else:  # a Unigram vocabulary is a list of tokens with their scores
        model["vocab"] = [[aliases.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & aliases.keys()]
    return state
