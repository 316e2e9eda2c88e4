"""A replay may replace the names of models in recorded requests."""

import pytest

from deploy.cli.replay import parse, proposed, renamed
from deploy.launcher.child_command import CliError
from shared.record import RecordedRequest
from tests.deploy.cli.requests import recorded


def asking(*names: str | None, model: str = "old") -> list[RecordedRequest]:
    return [recorded(request={"prompt": "p"} | ({"model": name} if name else {}), model=model) for name in names]


def sent(requests: list[RecordedRequest]) -> list[str | None]:
    return [request.request.get("model") for request in requests]


def test_names_the_server_does_not_have_become_its_model_if_the_record_is_of_one() -> None:
    requests = asking("old", "alias", "also-new", None)
    names = proposed(requests, ["new", "also-new"])
    assert names == {"alias": "new", "old": "new"}
    assert sent(renamed(requests, names)) == ["new", "new", "also-new", None]


def test_record_of_two_models_keeps_its_names() -> None:
    assert proposed([*asking("a", model="a"), *asking("b", model="b")], ["new"]) == {}


def test_given_names_replace_all_or_only_the_named_one() -> None:
    assert sent(renamed(asking("a", "b", None), parse(["c"]))) == ["c", "c", "c"]
    assert sent(renamed(asking("a", "b", None), parse(["a=c"]))) == ["c", "b", None]
    assert sent(renamed(asking("a", "b", None), parse(["a=c", "d"]))) == ["c", "d", "d"]


@pytest.mark.parametrize("word", ["a=", "=b", ""])
def test_text_that_names_no_model_is_refused(word: str) -> None:
    with pytest.raises(CliError, match="--model must be NEW or OLD=NEW"):
        parse([word])
