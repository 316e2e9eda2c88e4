"""The message of a server that is ready. Polling /ready is tested in test_serve.py."""

import json
import shlex

from deploy.launcher.watchdog import ready_message


def test_ready_message_has_commands_to_paste() -> None:
    text = ready_message("http://127.0.0.1:8000", "it's mine", "generate", keys=True)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("  curl")]
    bodies = [json.loads(words[-1]) for words in commands]
    assert [body["model"] for body in bodies] == ["it's mine", "it's mine"]
    assert [body.get("stream_format") for body in bodies] == [None, "events"]
    assert all("Authorization: Bearer $API_KEY" in words for words in commands)
    assert "Authorization" not in ready_message("http://127.0.0.1:8000", "demo", "generate", keys=False)


def test_ready_message_shows_what_the_servers_task_is() -> None:
    paths = {"chat": "/v1/chat/completions", "embed": "/v1/embeddings", "score": "/v1/rerank"}
    for task, path in paths.items():
        text = ready_message("http://127.0.0.1:8000", "m", task, keys=False)
        assert f"http://127.0.0.1:8000{path} " in text.split("curl")[1]
