"""The playground's files are served, load nothing from other hosts, and use existing routes and fields.

`tests/web` tests the playground in a browser, by `make browser`.
"""

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import frontend
from frontend.api.openai.chat_request import ChatRequest
from frontend.api.openai.completions import CompletionRequest
from frontend.observability.stats import Pool, stats
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import app_over

WEB = Path(next(iter(frontend.__path__))) / "web"
FILES = {path.name: path.read_text("utf-8") for path in WEB.iterdir() if path.is_file()}
VENDOR = WEB / "vendor"
SUMS = dict(reversed(line.split()) for line in (VENDOR / "SHA256SUMS").read_text().splitlines())
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".woff2": "font/woff2"}
TYPES[".mjs"] = TYPES[".js"]
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
ALL_JS = "\n".join(SCRIPTS.values())


class Tags(HTMLParser):
    """All tags of the page with their attributes, and the text inside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(FILES["index.html"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            self.inline += data

    def values(self, attribute: str) -> set[str]:
        return {attrs[attribute] or "" for _, attrs in self.found if attribute in attrs}


@pytest.fixture
async def http(tokenizer: Tokenizer) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app_over(FakePool(), tokenizer)), base_url="http://sluice")


async def test_the_page_is_served_with_a_strict_policy(http: httpx.AsyncClient) -> None:
    page = await http.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == rules["font-src"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"


def test_the_page_has_nothing_that_its_policy_forbids() -> None:
    tags = Tags()
    assert tags.inline.strip() == ""
    assert not [name for _, attrs in tags.found for name in attrs if name.startswith("on") or name == "style"]
    assert 'setAttribute("style"' not in ALL_JS


async def test_every_file_is_served_as_what_it_is_and_used(http: httpx.AsyncClient) -> None:
    tags = Tags()
    linked = {value for value in tags.values("src") | tags.values("href") if not value.startswith("data:")}
    imported = set(re.findall(r'(?:from|import) "\./([\w./-]+)"', ALL_JS))
    used = {value.removeprefix("web/") for value in linked} | imported
    assert {name for name in used if "/" not in name} == set(FILES) - {"index.html"}
    fonts = {f"vendor/{name}" for name in SUMS if name.startswith("fonts/")}
    assert {name for name in used if "/" in name} | fonts == {f"vendor/{name}" for name in SUMS} - {
        "vendor/LICENSES.txt"
    }
    for name in used | fonts:
        answer = await http.get(f"/web/{name}")
        assert answer.content == (WEB / name).read_bytes()
        assert answer.headers["content-type"] == TYPES[Path(name).suffix]


async def test_a_file_that_the_browser_has_is_not_sent_again(http: httpx.AsyncClient) -> None:
    first = await http.get("/web/main.js")
    again = await http.get("/web/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await http.get("/web/main.js", headers={"If-None-Match": '"other"'})).content == first.content


async def test_only_the_user_and_the_page_may_have_a_question_sent(http: httpx.AsyncClient) -> None:
    asked = "/?prompt=spend%20it&send=1&tab=chat"
    for site in ("cross-site", "same-site", None):
        answer = await http.get(asked, headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"} if site else {})
        assert (answer.status_code, answer.headers["location"]) == (303, "http://sluice/?prompt=spend+it&tab=chat")
    for site in ("none", "same-origin"):
        assert (await http.get(asked, headers={"Sec-Fetch-Site": site})).status_code == 200
    assert (await http.get("/?prompt=x", headers={"Sec-Fetch-Site": "cross-site"})).status_code in (200, 403)


def test_libraries_are_those_that_their_sums_name() -> None:
    found = {path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()) for path in VENDOR.rglob("*.*")}
    assert {name: digest.hexdigest() for name, digest in found.items() if name in SUMS} == SUMS
    assert set(found) - set(SUMS) == {"package.json", "refresh.sh"}


OUTSIDE = ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "..%2f..%2fx.js", "vendor/../../server/sse.py")
UNSERVED = ("none.js", "", ".js", "vendor", "vendor/package.json", "vendor/refresh.sh", "a" * 5000 + ".js")


@pytest.mark.parametrize("name", [*OUTSIDE, *UNSERVED])
async def test_nothing_else_is_served(http: httpx.AsyncClient, name: str) -> None:
    assert (await http.get(f"/web/{name}")).status_code == 404


def test_it_is_small_and_names_no_other_host() -> None:
    assert sum(map(len, FILES.values())) < 160_000
    for name, text in FILES.items():
        assert "://" not in text and not re.search(r"""["'(=]//""", text), name


def test_text_of_the_model_cannot_become_markup() -> None:
    dangerous = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|createContextualFragment"
    assert not re.findall(dangerous, ALL_JS)


async def test_the_routes_that_it_calls_exist(tokenizer: Tokenizer) -> None:
    called = set(re.findall(r'"(v1/[\w/]+|ready|stats|tokenize)"', ALL_JS))
    routes = {route.path for route in app_over(FakePool(), tokenizer).routes}  # type: ignore[attr-defined]
    assert called == {"ready", "stats", "v1/models", "v1/completions", "v1/chat/completions", "v1/streams"}
    assert {f"/{path}" for path in called} <= routes


def test_the_fields_that_it_sends_are_known_to_both_dialects() -> None:
    inputs = {str(attrs["name"]) for tag, attrs in Tags().found if tag in ("input", "textarea") and "name" in attrs}
    sampling = inputs - {"probabilities", "system", "tools", "input", "name"}
    sent = sampling | set(re.findall(r'^      (\w+): (?:"|\')', SCRIPTS["panel.js"], re.MULTILINE))
    assert {"temperature", "seed", "stop", "stream", "stream_options", "timings"} <= sent
    assert sent <= {*ChatRequest.__struct_fields__} & {*CompletionRequest.__struct_fields__}
    assert "tools" in inputs & {*ChatRequest.__struct_fields__}


def test_the_statistics_that_it_draws_exist() -> None:
    read = re.findall(r"\b(?:throughput|latency|worker)(?:\.\w+)+", SCRIPTS["live.js"])
    assert {"throughput.generation", "latency.ttft.p99", "latency.itl.p50", "worker.epoch"} <= set(read)
    for path in read:
        value: Any = msgspec.to_builtins(stats([Pool([], MODEL)], False))
        for key in path.split("."):
            value = value[key]


def test_the_elements_that_scripts_look_for_exist() -> None:
    looked_for = set(re.findall(r'(?:getElementById|\$|copyOf)\("([\w-]+)"\)', ALL_JS))
    assert {"state", "facts", "chart", "turn", "panel", "rivals"} <= looked_for <= Tags().values("id")
