"""Stand-ins of special tokens are characters that occur in no decoded text."""

from frontend.output_parser.model_format import HARMONY, spelled


def test_stand_ins_are_one_character_that_utf8_cannot_express() -> None:
    assert len({*HARMONY.values()}) == len(HARMONY)
    for mark in HARMONY.values():
        assert len(mark) == 1 and mark not in mark.encode(errors="surrogatepass").decode(errors="replace")


def test_spelled_writes_every_mark_out() -> None:
    text = "a".join(HARMONY.values())
    assert spelled(text) == "a".join(HARMONY) and spelled("é <|end|>") == "é <|end|>"
