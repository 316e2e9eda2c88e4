"""A field's JSON Schema and its decoding agree."""

from typing import Any

import pytest
from hypothesis import given, settings
from jsonschema_rs import Draft202012Validator, meta

from frontend.errors import SluiceError
from frontend.routes.openapi_paths import REQUESTS
from frontend.schema.base import RequestModel, fields_of, type_info
from frontend.schema.decoding import convert
from frontend.schema.json_schema import refused_fields, request_schema
from tests.frontend.api.harness import JSON
from tests.frontend.api.request_values import FIELDS, INSTEAD, LIKELY, plain, smallest


def takes(kind: type[RequestModel], name: str, value: Any) -> bool:
    try:
        body = {other: given for other, given in smallest(kind).items() if other != INSTEAD.get(name)}
        convert({**body, name: value}, kind)
    except SluiceError:
        return False
    return True


@pytest.mark.parametrize("name", FIELDS)
def test_field_schema_allows_exactly_what_decoding_accepts(name: str) -> None:
    kind, field = FIELDS[name]
    validator = Draft202012Validator(request_schema(kind)["properties"][field])

    @settings(deadline=None, max_examples=20, database=None)
    @given((LIKELY | JSON).filter(plain).filter(lambda value: value is not None))
    def agree(value: Any) -> None:
        assert takes(kind, field, value) == validator.is_valid(value), value

    agree()


@pytest.mark.parametrize("kind", REQUESTS.values(), ids=REQUESTS)
def test_request_schema_has_required_fields_and_no_refused_ones(kind: type[RequestModel]) -> None:
    shape = request_schema(kind)
    meta.validate(shape)
    assert shape["required"] == [field.name for field in type_info(kind).fields if field.required]
    assert {*fields_of(kind), *kind.ONLY} - set(shape["properties"]) == set(refused_fields(kind))
    valid = Draft202012Validator(shape).is_valid
    body = smallest(kind)
    assert valid(body) and not valid(body | {"unknown": 1})
    assert valid(body | {name: None for name in shape["properties"] if name not in shape["required"]})


def test_default_is_in_the_schema_only_if_it_could_be_sent() -> None:
    told = request_schema(REQUESTS["CompletionRequest"])["properties"]
    assert (told["n"]["default"], told["temperature"]["default"], told["echo"]["default"]) == (1, 1.0, False)
    assert not any("default" in told[name] for name in ("seed", "logit_bias", "stop", "logprobs", "max_tokens"))
