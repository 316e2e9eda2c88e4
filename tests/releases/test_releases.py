"""The most fetched releases are served, or refused, in each form as docs/releases.md says."""

import re
from datetime import date
from pathlib import Path

import pytest
import torch

from tests.releases.forms import FORMS, in_form
from tests.releases.layouts import shape_of, sizes_of
from tests.releases.page import PAGE, first_clause, page, read
from tests.releases.releases import RELEASES
from tests.releases.trial import BY_NAME, SERVED, Case, Outcome, cases, cut, label, tensors_of, text_of, try_case


def is_refused(case: Case) -> bool:
    return bool(BY_NAME[case[0]].refused) or case[1] == "unread"


DAYS = 12  # in which each trial has its day
TODAY = [case for at, case in enumerate(cases()) if at % DAYS == date.today().toordinal() % DAYS]


@pytest.mark.parametrize("case", TODAY, ids=lambda case: f"{case[0].partition('/')[2]}, {label(case)}")
def test_release_is_served_as_the_page_says(case: Case, tmp_path: Path) -> None:
    outcome = try_case(case, tmp_path / "tried")
    served, refused = read(PAGE.read_text())[case[0]]
    if is_refused(case):
        assert outcome.result != SERVED and BY_NAME[case[0]].refused in outcome.why
        assert f"{label(case)}: {first_clause(outcome.why)}" in refused
    else:
        assert outcome == Outcome(SERVED) and label(case) in served


def test_page_lists_all_that_is_tried(tmp_path: Path) -> None:
    """`python -m tests.releases` renews the page."""
    text = PAGE.read_text()
    days = set(re.findall(r"\d{4}-\d\d-\d\d", text))
    assert len(days) == 1
    outcomes = {
        case: try_case(case, tmp_path / str(number)) if is_refused(case) else Outcome(SERVED)
        for number, case in enumerate(cases())
    }
    assert page(outcomes, days.pop()) == text


def test_shapes_are_sums_of_multiples_of_sizes() -> None:
    assert shape_of("q+2k h 4", {"q": 8, "k": 2, "h": 5}) == (12, 5, 4)
    sizes = sizes_of({"hidden_size": 8, "vocab_size": 9, "num_attention_heads": 2, "num_hidden_layers": 1}, 4)
    assert shape_of("v h", sizes) == (9, 8) and shape_of("2q+k 1", sizes) == (24, 1)


def test_cut_release_keeps_the_settings_of_its_kept_layers() -> None:
    text = text_of(cut(BY_NAME["google/gemma-4-31B-it"]))
    assert text["layer_types"] == ["sliding_attention", "full_attention"] and text["num_hidden_layers"] == 2
    deepseek = text_of(cut(BY_NAME["deepseek-ai/DeepSeek-V3.1"]))
    assert deepseek["first_k_dense_replace"] == 1 and deepseek["n_group"] == 4


def test_form_of_few_bits_leaves_routers_heads_and_towers_as_they_are() -> None:
    release = BY_NAME["Qwen/Qwen3.6-35B-A3B"]
    state = tensors_of(release, cut(release))
    stored, numbers, config = in_form(state, "auto-round", release.plain, transposed=False)
    codes = {name for name, tensor in stored.items() if name.endswith(".qweight")}
    assert "model.language_model.layers.0.mlp.experts.3.down_proj.qweight" in codes
    assert not any(part in name for name in codes for part in ("mtp", "visual", "lm_head", "mlp.gate.", "in_proj_a"))
    assert "model.language_model.layers.0.linear_attn.in_proj_a" in config["extra_config"]
    assert torch.equal(numbers["lm_head.weight"], state["lm_head.weight"])


def test_stacked_gate_and_up_have_a_scale_each(tmp_path: Path) -> None:
    release = BY_NAME["mistralai/Mistral-Small-4-119B-2603"]
    stored, *_ = in_form(tensors_of(release, cut(release)), "fp8-static-fused", "", transposed=False)
    experts = "language_model.model.layers.0.mlp.experts."
    shapes = {name.removeprefix(experts): (*tensor.shape,) for name, tensor in stored.items() if experts in name}
    assert shapes["gate_up_proj"] == (4, 256, 256) and shapes["gate_up_proj_scale_inv"] == (4, 2, 1)
    assert shapes["down_proj_scale_inv"] == (4, 1, 1) and shapes["down_proj_activation_scale"] == (4,)
    assert try_case((release.model, "form", "fp8-static-fused"), tmp_path / "tried") == Outcome(SERVED)


def test_every_form_is_that_of_a_release() -> None:
    assert {one for release in RELEASES for one in release.forms} == {*FORMS}
