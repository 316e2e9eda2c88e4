"""Model names and times as Ollama writes them."""

import pytest

from frontend.api.ollama.chat import check_model, error, rfc3339, tagged
from frontend.errors import UnknownModel
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, context


@pytest.mark.parametrize(
    ("served", "asked"),
    [
        (MODEL, MODEL), (MODEL, f"{MODEL}:latest"), (f"{MODEL}:latest", MODEL), (f"{MODEL}:latest", f"{MODEL}:latest"),
        ("org/name:Q4_K_M", "org/name:Q4_K_M"),
    ],
)  # fmt: skip
def test_tag_may_be_left_out_or_added(tokenizer: Tokenizer, served: str, asked: str) -> None:
    check_model(asked, context(tokenizer, model=served))


@pytest.mark.parametrize("asked", ["other", "other:latest", f"{MODEL}:7b", f"{MODEL}:latest:latest:x", ":latest"])
def test_other_name_is_not_found(tokenizer: Tokenizer, asked: str) -> None:
    with pytest.raises(UnknownModel) as refused:
        check_model(asked, context(tokenizer))
    assert error(refused.value, "req") == b'{"error":"model \'%s\' not found"}' % asked.encode()


@pytest.mark.parametrize(
    ("name", "listed"),
    [("demo", "demo:latest"), ("demo:7b", "demo:7b"), ("a/b", "a/b:latest"), ("host:80/a", "host:80/a:latest")],
)
def test_listed_name_has_a_tag(name: str, listed: str) -> None:
    assert tagged(name) == listed


def test_time_is_in_utc() -> None:
    assert rfc3339(0) == "1970-01-01T00:00:00Z"
