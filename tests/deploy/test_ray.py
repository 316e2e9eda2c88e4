"""deploy/integrations/: the application's arguments and its calls of Ray, which a fake replaces."""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest


@dataclass
class Bound:
    """Replaces a bound deployment of Ray, and keeps the arguments that it was made with."""

    options: dict[str, Any]
    arguments: tuple[Any, ...] = ()

    def bind(self, *arguments: Any) -> "Bound":
        return Bound(self.options, arguments)


@pytest.fixture
def build_app(monkeypatch: pytest.MonkeyPatch) -> Any:
    ray, serve = ModuleType("ray"), ModuleType("ray.serve")
    serve.deployment = lambda kind, **options: Bound(options)  # type: ignore[attr-defined]
    serve.Application = Bound  # type: ignore[attr-defined]
    ray.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    monkeypatch.delitem(sys.modules, "deploy.integrations.ray_serve", raising=False)
    from deploy.integrations.ray_serve import build_app

    yield build_app
    del sys.modules["deploy.integrations.ray_serve"]


def test_arguments_of_the_command_line_are_texts_and_become_what_ray_takes(build_app: Any) -> None:
    app = build_app({"model": "m", "max_replicas": "4", "gpus": "1", "flags": "--device cuda", "python": "/env/python"})
    assert app.arguments == ("m", "--device cuda", "/env/python", 600.0)
    scaling = app.options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["target_ongoing_requests"]) == (1, 4, 16)
    assert app.options["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 1.0}
    assert build_app({"model": "m", "min_replicas": 3}).options["autoscaling_config"]["max_replicas"] == 3


@pytest.mark.parametrize(
    ("args", "words"),
    [({}, "`model` is missing"), ({"model": "m", "replicas": 2}, "unknown arguments: replicas")],
)
def test_arguments_that_are_none_are_refused_by_name(build_app: Any, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_app(args)


def test_server_that_ends_is_told_at_once(build_app: Any) -> None:
    replica = sys.modules["deploy.integrations.ray_serve"].Replica
    with pytest.raises(RuntimeError, match="ended with"):
        replica("/no/such/model", "--no-such-flag", sys.executable, 60.0)
