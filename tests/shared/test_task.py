"""The task of a checkpoint, as its files or --task state it."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.checkpoint import GENERATE, Task, TaskError, read_task
from shared.messages import PoolingKind

CAUSAL = {"architectures": ["Qwen3ForCausalLM"]}
HEADLESS = {"architectures": ["Qwen3Model"]}
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}


def folder_with(folder: Path, config: Any, modules: Any = None, pooling: Any = None, settings: Any = None) -> Path:
    files = {"config.json": config, "modules.json": modules, "1_Pooling/config.json": pooling}
    for name, value in {**files, "config_sentence_transformers.json": settings}.items():
        if value is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("config", "wanted", "task"),
    [
        (CAUSAL, "auto", GENERATE),
        ({}, "auto", GENERATE),
        ({"model_type": ["bert"], "architectures": [3]}, "auto", GENERATE),  # a worker refuses both by name
        (CAUSAL, "embed", Task("embed")),
        (CAUSAL, "score", Task("score")),
        (HEADLESS, "auto", Task("embed")),
        (CLASSIFIER, "auto", Task("score", labels=1)),
        (CLASSIFIER, "score", Task("score", labels=1)),
    ],
)
def test_task_follows_the_class_and_the_flag(tmp_path: Path, config: Any, wanted: str, task: Task) -> None:
    assert read_task(folder_with(tmp_path, config), wanted) == task


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, PoolingKind.LAST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, PoolingKind.MEAN),
        ({"pooling_mode_cls_token": True}, PoolingKind.FIRST),
        ({"pooling_mode": "mean"}, PoolingKind.MEAN),
        ({"pooling_mode": ["lasttoken"]}, PoolingKind.LAST),
    ],
)
def test_modules_say_how_to_pool_and_whether_to_normalize(tmp_path: Path, pooling: Any, kind: PoolingKind) -> None:
    prompts = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": None}
    modules = [TRANSFORMER, POOLING]
    folder = folder_with(tmp_path, CAUSAL, modules, pooling, prompts)
    assert read_task(folder) == Task("embed", kind, False, prompts=prompts["prompts"])
    (folder / "modules.json").write_text(json.dumps([*modules, NORMALIZE]))
    assert read_task(folder).normalized
    assert read_task(folder, "generate") == GENERATE


def test_cross_encoder_scores(tmp_path: Path) -> None:
    assert read_task(folder_with(tmp_path, CAUSAL, settings={"model_type": "CrossEncoder"})) == Task("score")


@pytest.mark.parametrize(
    ("files", "wanted", "words"),
    [
        ({"config": CLASSIFIER}, "generate", "--task generate: .* is a classifier"),
        ({"config": CLASSIFIER}, "embed", "--task embed: .* is a classifier"),
        ({"config": {**CLASSIFIER, "id2label": {"0": "a", "1": "b"}}}, "auto", "2 labels"),
        ({"config": {"architectures": ["LlamaForSequenceClassification"]}}, "auto", "2 labels"),
        ({"config": HEADLESS}, "score", "embedding model"),
        ({"config": CAUSAL, "modules": [POOLING]}, "auto", "1_Pooling/config.json is missing"),
        ({"config": CAUSAL, "modules": [{"type": "a.models.Dense"}]}, "auto", "modules.json: module 'Dense'"),
        ({"config": CAUSAL, "modules": {}}, "auto", "modules.json must hold a JSON array"),
        ({"config": CAUSAL, "modules": [POOLING], "pooling": {}}, "auto", "pooling none is not supported"),
        (
            {"config": CAUSAL, "modules": [POOLING], "pooling": {"pooling_mode_weightedmean_tokens": True}},
            "auto",
            "pooling weightedmean is not supported; supported is one of lasttoken, mean, cls",
        ),
        (
            {
                "config": CAUSAL,
                "modules": [POOLING],
                "pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            },
            "auto",
            "pooling mean and lasttoken",
        ),
        (
            {"config": CAUSAL, "modules": [POOLING], "pooling": {"pooling_mode": "mean", "include_prompt": False}},
            "auto",
            "include_prompt false",
        ),
        ({"config": HEADLESS, "settings": {"default_prompt_name": "query"}}, "auto", "there is no prompt 'query'"),
        ({"config": HEADLESS, "settings": {"prompts": ["query"]}}, "auto", "prompts is not an object of texts"),
        ({"config": CAUSAL, "modules": [1]}, "auto", r"modules\.json: 1 is not a module"),
        ({"config": CAUSAL, "modules": [POOLING], "pooling": {"pooling_mode": 7}}, "auto", "pooling 7 is not"),
        ({"config": {**CLASSIFIER, "id2label": [1]}}, "auto", r"id2label \[1\] is not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(tmp_path: Path, files: Any, wanted: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        read_task(folder_with(tmp_path, **files), wanted)


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TaskError, match=r"config\.json cannot be read as JSON"):
        read_task(tmp_path)


@pytest.mark.parametrize(("config", "task"), [
    ({"model_type": "bert", "architectures": ["BertModel"]}, Task("embed", PoolingKind.MEAN, encoder=True)),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, Task("embed", PoolingKind.MEAN, encoder=True)),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, Task("embed", PoolingKind.MEAN, encoder=True)),
    (
        {
            "model_type": "roberta", "architectures": ["RobertaForSequenceClassification"],
            "id2label": {"0": "no", "1": "yes"},
        },
        Task("score", labels=2, encoder=True, label_names=("no", "yes")),
    ),
])  # fmt: skip
def test_encoder_is_known_by_its_config(tmp_path: Path, config: dict[str, object], task: Task) -> None:
    assert read_task(folder_with(tmp_path, config)) == task
    with pytest.raises(TaskError, match="--task generate"):
        read_task(folder_with(tmp_path, config), "generate")


@pytest.mark.parametrize(
    ("path", "message"), [("../elsewhere", "is not a folder in the checkpoint"), ("2_Dense", "is missing")]
)
def test_linear_after_pooling_must_lie_in_the_checkpoint(tmp_path: Path, path: str, message: str) -> None:
    folder = folder_with(tmp_path, {"model_type": "bert"})
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense", "path": path}]))
    with pytest.raises(TaskError, match=message):
        read_task(folder)
