"""Tokens that break the sequences of DRY: those with a text, and those that begin it and what has to follow them."""

from frontend.text.dry_breakers import breaker_sequences
from frontend.text.tokenizer import Tokenizer


async def test_every_token_with_the_text_or_its_beginning_is_found(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    for text in ("e", "ll", "hello\n"):
        found = await breaker_sequences(tokenizer, (text,), size)
        whole = {id for id in range(size) if text.encode() in tokenizer.token_bytes(id)}
        assert {id for id, tails in found.items() if () in tails} == whole
        begins = {
            id: {at for at in range(1, len(text)) if tokenizer.token_bytes(id).endswith(text[:at].encode())}
            for id in set(range(size)) - whole
        }
        assert found.keys() - whole == {id for id, places in begins.items() if places}
        for id in found.keys() - whole:
            rests = {tokenizer.decode(tail, skip_special=False) for tail in found[id]}
            assert rests == {text[at:] for at in begins[id]}
