"""The largest values of fields: how they are found, and a few of them sent to a server with 152,000 tokens."""

from pathlib import Path

from frontend.routes import openapi
from tests.e2e.server import serving
from tests.fuzz import wide_model
from tests.fuzz.large_values import ATTACKS, OTHER, OtherStream, attempt, fields, keys_in
from tests.fuzz.watch import watching
from tests.patience import PATIENCE_S

FEW = ("sixteen samplers, n = 32", "all biases, n = 16", "all ids allowed, 800 prompts", "pieces of 7 MiB")


def test_every_route_has_fields_with_a_largest_value() -> None:
    found = [*fields(openapi.document())]
    by_name = {name: body for name, _, body in found}
    document = openapi.document()
    bodies = {path: methods.get("post", {}).get("requestBody", {}) for path, methods in document["paths"].items()}
    posts = {path for path, body in bodies.items() if "application/json" in body.get("content", {})}
    assert {path for _, path, _ in found} == posts and len(posts) > 40 and len(found) > 1300
    assert len(by_name["/v1/completions stop"]["stop"]) >= 4000
    assert len(by_name["/v1/chat/completions bad_words"]["bad_words"]) == 256
    assert by_name["/v1/completions n"]["n"] == 128
    for path in ("/v1/chat/completions", "/chat/completions", "/v1/chat/completions/render"):
        assert "documents" not in by_name[f"{path} n"] and by_name[f"{path} n"]["messages"], (
            "else all fields are refused"
        )
    assert by_name["/v1/rerank query"]["documents"]
    assert len(by_name["/v1/completions logit_bias"]["logit_bias"]) > 100_000


def test_largest_values_harm_nobody(tmp_path: Path) -> None:
    model = str(wide_model.save(tmp_path / "wide"))
    flags = ("--max-logprobs", "20", *keys_in(tmp_path))
    with serving(model, tmp_path / "log", *flags) as server, watching(server) as watch:
        server.headers = OTHER
        other = OtherStream(server.url)
        rows = [attempt(watch, other, *one) for one in ATTACKS if one[0] in FEW]
        other.close()
    assert len(rows) == len(FEW)
    for row in rows:
        assert row.status in (200, 400, 422) and not row.died and row.silence < PATIENCE_S / 4, row
