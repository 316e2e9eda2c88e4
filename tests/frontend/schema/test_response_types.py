"""The base of all response types, and the JSON Schemas made of them."""

import msgspec
from jsonschema_rs import Draft202012Validator
from msgspec import UNSET, UnsetType

from frontend.schema.base import ResponseModel
from frontend.schema.responses import Health, Model, ModelList, ModelStatus, schemas


class Part(ResponseModel):
    kind: str = "part"
    extra: int | UnsetType = UNSET


class Whole(ResponseModel):
    parts: list[Part]
    by_name: dict[str, Part]
    note: str | None


class A(ResponseModel, tag_field="type", tag="a"):
    x: int


class B(ResponseModel, tag_field="type", tag="b"):
    part: Part


def test_schemas_require_every_field_that_cannot_be_unset() -> None:
    made = schemas({"Whole": Whole})
    assert made["Whole"]["required"] == ["parts", "by_name", "note"]
    assert made["Part"]["required"] == ["kind"] and "default" not in made["Part"]["properties"]["kind"]


def test_schemas_of_a_union_name_it_and_require_its_tag() -> None:
    made = schemas({"Either": A | B})
    assert {shape["$ref"].rsplit("/", 1)[1] for shape in made["Either"]["anyOf"]} == {"A", "B"}
    assert made["A"]["required"] == ["x", "type"] and made["Part"]["required"] == ["kind"]


def test_schemas_accept_what_the_types_encode() -> None:
    made = schemas({"Whole": Whole})
    validator = Draft202012Validator({**made["Whole"], "components": {"schemas": made}})
    value = msgspec.to_builtins(Whole(parts=[Part(), Part(extra=1)], by_name={"p": Part()}, note=None))
    assert value["parts"] == [{"kind": "part"}, {"kind": "part", "extra": 1}]
    assert validator.is_valid(value)
    assert not validator.is_valid({**value, "parts": [{}]}) and not validator.is_valid({"parts": []})


def test_constant_fields_are_written() -> None:
    assert msgspec.json.encode(Health(model_loaded=True)) == b'{"status":"ok","model_loaded":true}'
    model = Model(
        id="m",
        created=1,
        root="m",
        max_model_len=None,
        display_name="m",
        created_at="t",
        max_input_tokens=None,
        fingerprint=None,
        status=ModelStatus(value="loaded"),
    )
    listing = msgspec.to_builtins(ModelList(data=[model], models=[], first_id="m", last_id="m"))
    assert listing["object"] == "list" and listing["data"][0]["object"] == "model" and listing["has_more"] is False
