"""The generated tables of docs/api.md. tests/docs compares all generated tables with the pages."""

import pytest

from deploy.generate.docs import TABLES
from deploy.generate.docs_api import API_FORMATS, effective
from frontend.routes.openapi_paths import REQUESTS
from frontend.schema.json_schema import ignored_fields, refused_fields


@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_field_is_effective_ignored_limited_or_refused(request_name: str) -> None:
    kind = REQUESTS[request_name]
    groups = [
        [name for name, _, _ in effective(request_name)], ignored_fields(kind), list(kind.ONLY), refused_fields(kind),
    ]  # fmt: skip
    assert sorted(name for group in groups for name in group) == sorted({*kind.__struct_encode_fields__, *kind.ONLY})


@pytest.mark.parametrize("group", ["fields", "ignored", "only", "refused"])
def test_field_table_names_every_field_of_its_group(group: str) -> None:
    table = TABLES[group]()
    for request in API_FORMATS.values():
        kind = REQUESTS[request]
        names = {
            "fields": [name for name, _, _ in effective(request)], "ignored": ignored_fields(kind),
            "only": list(kind.ONLY), "refused": refused_fields(kind),
        }  # fmt: skip
        assert [name for name in names[group] if f"`{name}`" not in table] == []


def test_code_table_has_the_refusals_of_fields() -> None:
    assert all(f"`{code}`" in TABLES["codes"]() for code in ("wrong_type", "unsupported_field", "unsupported_content"))
