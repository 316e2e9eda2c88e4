"""deploy/litellm/ and deploy/llama-swap/ use fields that these proxies document, and existing flags and routes."""

import shlex

from jsonschema_rs import validator_for

from frontend.app import ROUTES
from shared.config.flags import Parser, add_flags, read
from tests.deploy.kubernetes.objects import INTEGER, STRING, closed, several
from tests.deploy.starts import DEPLOY, FLAGS, documents

LITELLM = closed(
    ("model_list",),
    model_list=several(
        closed(
            ("model_name", "litellm_params"),
            model_name=STRING,
            litellm_params=closed(("model", "api_base", "api_key"), model=STRING, api_base=STRING, api_key=STRING),
            model_info=closed(("mode",), mode={"enum": ["embedding", "chat"]}),
        )
    ),
)
MODEL = closed(("cmd",), cmd=STRING, checkEndpoint=STRING, ttl=INTEGER, useModelName=STRING)
LLAMA_SWAP = closed(
    ("models",),
    healthCheckTimeout=INTEGER,
    models={"type": "object", "additionalProperties": MODEL, "minProperties": 1},
)


def test_litellm_speaks_openai_with_the_servers() -> None:
    [config] = documents(DEPLOY / "litellm/config.yaml")
    validator_for(LITELLM).validate(config)
    chat, embeddings = [one["litellm_params"] for one in config["model_list"]]
    assert chat["model"].startswith("openai/") and embeddings["model"].startswith("openai/")
    assert all(one["api_base"].endswith("/v1") for one in (chat, embeddings))
    assert chat["api_base"] != embeddings["api_base"], "a server has one --task"


def test_llama_swap_starts_servers_on_its_ports_and_asks_routes_that_exist() -> None:
    [config] = documents(DEPLOY / "llama-swap/config.yaml")
    validator_for(LLAMA_SWAP).validate(config)
    for name, model in config["models"].items():
        program, role, *words = shlex.split(model["cmd"].replace("${PORT}", "5801"))
        parser = Parser()
        add_flags(parser, FLAGS[role])
        settings = read(parser.read(words), {}, FLAGS[role])
        assert (program, role, settings.frontend.port, settings.worker.worker_metrics_port) == (
            "sluice",
            "serve",
            5801,
            0,
        )
        assert settings.model.names[0] == model.get("useModelName", name)
        assert model["checkEndpoint"] == "/ready" in {path for _, path, _ in ROUTES}
