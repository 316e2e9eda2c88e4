"""The base class of request types: its facts about a type, and refusals that name a field."""

from typing import Annotated

import pytest
from msgspec import Meta
from msgspec import inspect as nodes

from frontend.errors import BadRequest, Unprocessable
from frontend.schema.base import FieldError, RequestModel, alternatives, bare, fields_of, out_of_range, wrong_type
from frontend.schema.decoding import convert


class Inner(RequestModel):
    low: int = 0
    high: int = 9

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise FieldError("low", "is above `high`")


class Outer(RequestModel):
    text: Annotated[str, Meta(min_length=1)] | list[str] | None = None
    parts: list[Inner] | None = None
    required: int


def test_field_error_names_the_path_of_its_field() -> None:
    error = FieldError("content", "is missing", BadRequest, "missing_field").at("messages[1].")
    assert (error.status, error.param, error.code) == (400, "messages[1].content", "missing_field")
    assert error.message == "`messages[1].content` is missing"


def test_field_error_of_a_nested_object_names_the_whole_path() -> None:
    assert convert({"required": 1, "parts": [{"low": 3}]}, Outer).parts == [Inner(low=3)]
    with pytest.raises(Unprocessable) as refused:
        convert({"required": 1, "parts": [{}, {"low": 10}]}, Outer)
    assert (refused.value.param, refused.value.message) == ("parts[1].low", "`parts[1].low` is above `high`")


def test_required_field_after_a_bases_optional_ones_is_allowed() -> None:
    class More(Inner):
        name: str

    assert [name for name, field in fields_of(More).items() if field.required] == ["name"]


def test_alternatives_are_all_types_but_null() -> None:
    kinds = [type(bare(one)) for one in alternatives(fields_of(Outer)["text"].type)]
    assert kinds == [nodes.StrType, nodes.ListType]


def test_refusals_say_what_was_expected_and_what_was_given() -> None:
    assert wrong_type("n", "8", "an integer").message == "`n` must be an integer, not a string"
    assert out_of_range("n", 0, "at least 1").message == "`n` must be at least 1, got 0"
