"""Models that clients fetch and name (--allow-pull): a server of two frontends, and a local hub."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serving
from tests.gguf_files import write
from tests.hub_server import Hub
from tests.patience import PATIENCE_S

FILE = "Tiny-Q8_0.gguf"
BASE = "org/tiny:Q8_0"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    data = write("qwen3", tmp_path_factory.mktemp("made"), "Q8_0").file.read_bytes()
    data += bytes(40_000_000)  # the hub's client writes pieces of 10 MB
    (folder / FILE).write_bytes(data)
    with Hub(folder, stated={FILE: hashlib.sha256(data).hexdigest()}).serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(hub: Hub, home: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, started(hub, home, patch) as server:
        yield server


@contextmanager
def started(hub: Hub, home: Path, patch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in {
        "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(home / "cache"), "HF_HUB_DISABLE_XET": "1",
        "XDG_DATA_HOME": str(home / "data"), "XDG_CONFIG_HOME": str(home / "config"),
    }.items():  # fmt: skip
        patch.setenv(name, value)
    flags = ("--allow-pull", "--model", "demo", "--frontends", "2", "--kv-cache-gb", "0.02", "--device", "cpu")
    with serving(None, home / "log", *flags, "--load-wait", str(PATIENCE_S), name="") as server:
        yield server


def lines(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json=body, timeout=PATIENCE_S) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
        return [json.loads(line) for line in response.iter_lines()]


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=PATIENCE_S)


def delete(server: Server, name: str) -> httpx.Response:
    return httpx.request("DELETE", f"{server.url}/api/delete", json={"model": name}, timeout=PATIENCE_S)


def tags(server: Server) -> set[str]:
    found = httpx.get(f"{server.url}/api/tags", timeout=PATIENCE_S).json()
    return {model["name"].removesuffix(":latest") for model in found["models"]}


def render(server: Server, model: str, *messages: dict[str, str]) -> str:
    body = {"model": model, "messages": list(messages)}
    answer = httpx.post(f"{server.url}/v1/chat/completions/render", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    detok = httpx.post(
        f"{server.url}/detokenize", json={"model": model, "tokens": answer.json()["token_ids"]}, timeout=PATIENCE_S
    )
    return str(detok.json()["prompt"])


@pytest.fixture(scope="module")
def pulled(server: Server, hub: Hub) -> list[dict[str, Any]]:
    """The lines of the first pull."""
    return lines(server, "/api/pull", model=BASE)


def test_a_pull_tells_its_progress_and_the_model_answers(
    server: Server, hub: Hub, pulled: list[dict[str, Any]]
) -> None:
    digest = hub.stated[FILE]
    words = list(dict.fromkeys(line["status"] for line in pulled))
    assert words[0] == "pulling manifest" and words[-2:] == ["writing manifest", "success"]
    last = [line for line in pulled if line["status"] == f"pulling {digest[:12]}"][-1]
    assert (last["digest"], last["completed"]) == (f"sha256:{digest}", last["total"])
    assert tags(server) == {"demo", BASE}
    answer = post(server, "/api/generate", model=BASE, prompt="a", raw=True, stream=False, options={"num_predict": 3})
    assert answer.status_code == 200 and answer.json()["model"] == BASE, answer.text
    assert post(server, "/api/pull", model=BASE, stream=False).json() == {"status": "success"}, "all of it is here"


def test_pulls_that_fail_say_why(server: Server, hub: Hub) -> None:
    (*_, last) = lines(server, "/api/pull", model="org/absent:Q4_0")
    assert set(last) == {"error"} and "org/absent" in last["error"]
    assert post(server, "/api/pull", model="no-such-name", stream=False).status_code == 404
    hub.refusal = (403, "GatedRepo")
    try:
        answer = post(server, "/api/pull", model="org/gated:Q4_0", stream=False)
    finally:
        hub.refusal = None
    assert answer.status_code == 400 and "is gated: accept its terms" in answer.json()["error"]
    for name in ("/etc/passwd", "../x", "a,b", ""):
        assert post(server, "/api/pull", model=name, stream=False).status_code == 400, name


def test_a_pull_ends_with_its_last_client_and_the_next_continues(
    server: Server, hub: Hub, home: Path, pulled: list[dict[str, Any]]
) -> None:
    assert delete(server, BASE).status_code == 200
    assert BASE not in tags(server) and not list((home / "cache").rglob("*.gguf"))
    hub.bytes_per_s, size = 20_000_000, (hub.folder / FILE).stat().st_size
    events = list[dict[str, Any]]()
    watching = threading.Thread(target=watch, args=(server, events))
    watching.start()
    hub.downloads.clear()
    try:
        for _ in range(2):
            with httpx.stream("POST", f"{server.url}/api/pull", json={"model": BASE}, timeout=PATIENCE_S) as response:
                for line in response.iter_lines():
                    if json.loads(line).get("completed", 0) > size // 4:
                        break
                else:
                    raise AssertionError("the download was not cut")
            until(lambda: any(event["event"] == "download_failed" for event in events))
        hub.bytes_per_s = 0
        assert lines(server, "/api/pull", model=BASE)[-1] == {"status": "success"}
    finally:
        hub.bytes_per_s = 0
    starts = [int(one.partition("@")[2]) for one in hub.downloads if one.startswith(FILE)]
    assert max(starts) > size // 8, "only the rest was sent"
    watching.join()
    kinds = [event["event"] for event in events if event["model"] == BASE]
    assert "download_progress" in kinds and kinds[-1] == "download_finished"


def watch(server: Server, events: list[dict[str, Any]]) -> None:
    with httpx.stream("GET", f"{server.url}/models/sse", timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if events[-1]["event"] == "download_finished":
                    return


def until(true: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


MODELFILE = f'''
# what it is
FROM {BASE}
PARAMETER temperature 0
PARAMETER num_predict 4
PARAMETER stop "@@"
PARAMETER num_ctx 64
SYSTEM """You are
brief."""
MESSAGE user hello
MESSAGE assistant hi
'''


def test_names_have_their_own_defaults_on_every_route(server: Server, pulled: list[dict[str, Any]]) -> None:
    made = lines(server, "/api/create", model="brief", modelfile=MODELFILE)
    assert [line["status"] for line in made] == [
        "creating system layer", "creating parameters layer", "creating messages layer", "writing manifest", "success",
    ]  # fmt: skip
    user = {"role": "user", "content": "and you"}
    prompt = render(server, "brief", user)
    assert prompt.index("You are\nbrief.") < prompt.index("hello") < prompt.index("hi") < prompt.index("and you")
    own = render(server, "brief", {"role": "system", "content": "Be long."}, user)
    assert "brief" not in own and own.index("Be long.") < own.index("hello")
    answers = [
        post(server, "/v1/chat/completions", model="brief", messages=[user]).json() for _ in range(2)
    ]  # fmt: skip
    assert [one["model"] for one in answers] == ["brief"] * 2
    texts = {one["choices"][0]["message"]["content"] for one in answers}
    assert len(texts) == 1, "at temperature 0"
    assert answers[0]["usage"]["completion_tokens"] <= 4
    assert post(server, "/api/chat", model="brief:latest", messages=[user], stream=False).json()["eval_count"] <= 4
    shown = post(server, "/api/show", model="brief").json()
    assert (shown["system"], shown["messages"][1]) == ("You are\nbrief.", {"role": "assistant", "content": "hi"})
    assert set(shown["parameters"].splitlines()) == {"temperature 0", "num_predict 4", 'stop "@@"'}
    assert shown["modelfile"].startswith(f"FROM {BASE}\n")
    states = {one["id"]: one["status"]["value"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert states["brief"] == states[BASE] == "loaded", "it is the same worker"


def test_names_of_names_templates_and_copies(server: Server, pulled: list[dict[str, Any]]) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    fields: dict[str, Any] = {"from": BASE, "system": "S.", "parameters": {"temperature": 0.5, "mirostat": 0}}
    assert post(server, "/api/create", model="one", stream=False, **fields).json() == {"status": "success"}
    more: dict[str, Any] = {"from": "one", "template": template, "parameters": {"top_k": 5}}
    assert post(server, "/api/create", model="two", stream=False, **more).status_code == 200
    user = {"role": "user", "content": "x"}
    assert render(server, "two", user) == "<system>S.<user>x"
    shown = post(server, "/api/show", model="two").json()
    assert shown["template"] == template and {"temperature 0.5", "top_k 5"} <= set(shown["parameters"].splitlines())
    assert post(server, "/api/copy", source="two", destination="three").status_code == 200
    assert delete(server, "two").status_code == 200
    assert render(server, "three", user) == "<system>S.<user>x"
    assert post(server, "/v1/chat/completions", model="two", messages=[user]).status_code == 404
    assert delete(server, "two").status_code == 404
    assert delete(server, "three").status_code == 200


@pytest.mark.parametrize(("body", "words"), [
    ({"from": BASE, "parameters": {"temprature": 1}}, "parameters.temprature"),
    ({"from": BASE, "parameters": {"mirostat": 2}}, "parameters.mirostat"),
    ({"from": BASE, "parameters": {"temperature": "hot"}}, "parameters.temperature"),
    ({"from": BASE, "template": "{{ .System }}{{ .Prompt }}"}, "one of Go"),
    ({"from": BASE, "template": "{% if %}"}, "does not compile"),
    ({"modelfile": "SYSTEM hello"}, "FROM is missing"),
    ({"modelfile": f"FROM {BASE}\nSYTEM hello"}, "line 2"),
    ({"modelfile": f"FROM {BASE}\nADAPTER x"}, "ADAPTER"),
    ({}, "`from`"),
    ({"from": BASE, "files": {"a": "sha256:b"}}, "`files`"),
    ({"from": "/etc/passwd"}, "`from`"),
])  # fmt: skip
def test_names_that_cannot_be_made_are_refused_by_the_field(
    server: Server, pulled: list[dict[str, Any]], body: dict[str, Any], words: str
) -> None:
    answer = post(server, "/api/create", model="bad", **body)
    assert answer.status_code == 400 and words in answer.json()["error"], answer.text
    assert "bad" not in tags(server)


def test_the_servers_own_models_stay(server: Server, pulled: list[dict[str, Any]]) -> None:
    assert delete(server, "demo").status_code == 403
    assert post(server, "/api/create", model="demo", stream=False, **{"from": BASE}).status_code == 400
    assert post(server, "/api/pull", model="demo", stream=False).json() == {"status": "success"}
    assert post(server, "/api/copy", source="absent", destination="x").status_code == 404


def test_a_pulled_model_that_names_depend_on_is_renamed_or_stays(
    server: Server, home: Path, pulled: list[dict[str, Any]]
) -> None:
    assert post(server, "/api/create", model="system", stream=False, **{"from": BASE, "system": "S"}).status_code == 200
    refused = delete(server, BASE)
    assert refused.status_code == 400 and "system" in refused.json()["error"]
    assert post(server, "/api/copy", source=BASE, destination="again").status_code == 200
    assert delete(server, BASE).status_code == 200
    assert BASE not in tags(server) and {"again", "system"} <= tags(server)
    assert "S" in render(server, "system", {"role": "user", "content": "x"})
    assert list((home / "cache").rglob("*.gguf"))
