"""Draws the tests that `make test` runs, because the whole suite takes far longer than a newcomer waits.

`make test` passes `--sample DAY`. Of the files and tests in the tables below, only the stated numbers are then run.
They are drawn anew each day, so that every test runs on some day. Tests that are in no table always run, those of
Hypothesis with at most EXAMPLES examples.

`make test FULL=1` passes `--turns DAY` and runs all tests with all examples, but of the longest ones, which stand in
TURNS, each on its day. `make test FULL=all`, and pytest without either flag, run everything.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from itertools import groupby
from pathlib import Path

EXAMPLES = 20
FILES = {  # folder or file → how many of its test files are read at all; most start servers or compute long
    "tests/bench": 4,
    "tests/deploy": 40,
    "tests/e2e": 3,
    "tests/e2e/test_contract.py": 1,
    "tests/e2e/test_sdks.py": 1,
    "tests/e2e/test_serve.py": 1,
    "tests/frontend": 120,
    "tests/fuzz": 1,
    "tests/shared": 34,
    "tests/worker/lora": 4,
    "tests/worker/ops": 30,
    "tests/worker/ops/test_interpreter.py": 1,
    "tests/worker/checkpoint": 2,
    "tests/worker/models": 11,
    "tests/worker/distributed": 9,
    "tests/worker/model_runner": 11,
    "tests/worker/quantization": 4,
    "tests/worker/spec_decode": 3,
    "tests/worker/vision": 4,
}
CASES = {  # folder, file or function → how many parametrized cases of each test function run
    "tests/bench/simulate/test_modes.py": 2,
    "tests/deploy/launcher/test_recovery.py": 1,
    "tests/docs/test_docs.py": 1,
    "tests/e2e": 2,
    "tests/faults": 1,
    "tests/frontend/api/openai/test_chat_output.py": 4,
    "tests/frontend/schema/test_decoding.py": 40,
    "tests/frontend/schema/test_request_schema.py": 20,
    "tests/frontend/chat/test_tools.py": 5,
    "tests/frontend/output_parser": 6,
    "tests/frontend/server/test_http_protocol.py": 4,
    "tests/frontend/test_main.py": 1,
    "tests/fuzz/test_kinds.py": 2,
    "tests/releases/test_releases.py::test_release_is_served_as_the_page_says": 6,
    "tests/shared/gguf": 3,
    "tests/worker/lora": 3,
    "tests/worker/ops": 2,
    "tests/worker/ops/cpu": 4,
    "tests/worker/checkpoint": 3,
    "tests/worker/models": 3,
    "tests/worker/models/test_cpu_decoder.py": 6,
    "tests/worker/models/test_cpu_decoder_bounds.py": 8,
    "tests/worker/models/test_decoder.py": 4,
    "tests/worker/distributed": 4,
    "tests/worker/model_runner": 4,
    "tests/worker/quantization": 3,
    "tests/worker/spec_decode": 4,
    "tests/worker/vision": 3,
    "tests/worker/test_eight_bit_cache.py": 2,
    "tests/worker/test_matrix.py": 3,
    "tests/worker/test_windowed_cache.py": 2,
}
TESTS = {  # file or function → how many of its tests run, after the draw from CASES; 0: only FULL=1 runs them
    "tests/bench/gpu/test_command.py::test_gpu_command_runs_all_sections_on_the_cpu": 0,
    "tests/bench/gpu/test_driver.py": 3,
    "tests/bench/real": 1,
    "tests/bench/test_main.py": 2,
    "tests/deploy/kubernetes": 6,
    "tests/deploy/generate/test_field_table.py": 4,
    "tests/deploy/launcher/test_hub.py": 0,
    "tests/deploy/launcher/test_plan.py": 15,
    "tests/deploy/launcher/test_spare.py": 1,
    "tests/deploy/launcher/test_packaged_model.py": 1,
    "tests/deploy/launcher/test_recovery.py": 0,
    "tests/docs/test_folder_picture.py": 0,
    "tests/e2e/test_adapters.py": 2,
    "tests/e2e/test_branches.py": 2,
    "tests/e2e/test_contract.py": 2,
    "tests/e2e/test_contract_busy.py": 1,
    "tests/e2e/test_drafts.py": 1,
    "tests/e2e/test_fields.py": 2,
    "tests/e2e/test_gguf.py": 1,
    "tests/e2e/test_grammar.py": 2,
    "tests/e2e/test_llama_cpp.py": 4,
    "tests/e2e/test_llm.py": 2,
    "tests/e2e/test_many_models.py": 1,
    "tests/e2e/test_modes.py": 1,
    "tests/e2e/test_neighbours.py": 1,
    "tests/e2e/test_parity.py": 1,
    "tests/e2e/test_images.py": 1,
    "tests/e2e/test_pool.py": 1,
    "tests/e2e/test_pooling.py": 1,
    "tests/e2e/test_rank_hosts.py": 1,
    "tests/e2e/test_ranks.py": 1,
    "tests/e2e/test_serve.py": 2,
    "tests/e2e/test_sglang.py": 1,
    "tests/e2e/test_tools.py": 2,
    "tests/faults/test_batches.py": 0,
    "tests/faults/test_clocks.py": 0,
    "tests/faults/test_faults.py": 0,
    "tests/frontend/chat/test_untrusted.py": 8,
    "tests/frontend/routes/test_openapi.py::test_process_that_has_read_all_types_ends_without_a_crash": 0,
    "tests/frontend/server/test_bodies.py::test_a_hundred_hostile_clients_take_bounded_memory": 0,
    "tests/frontend/test_main.py": 2,
    "tests/frontend/workers/test_pool.py": 3,
    "tests/fuzz/test_fuzz.py": 2,
    "tests/fuzz/test_fuzz.py::test_openapi_requests_get_documented_answers": 0,
    "tests/fuzz/test_large_values.py::test_largest_values_harm_nobody": 0,
    "tests/real": 0,
    "tests/shared/gguf/test_pooling.py": 2,
    "tests/shared/gguf/test_hub.py": 4,
    "tests/shared/gguf/test_tokenizer.py": 5,
    "tests/shared/test_kept_memory.py": 0,
    "tests/wire/test_repair.py": 3,
    "tests/wire/test_round_trip.py": 3,
    "tests/worker/gpu/test_rehearsal.py": 0,
    "tests/worker/ops/cpu/test_amx.py": 0,
    "tests/worker/ops/cpu/test_sanitized.py": 0,
    "tests/worker/ops/gpu/attention/test_key_splits.py": 1,
    "tests/worker/ops/gpu/attention/test_work_items.py": 2,
    "tests/worker/ops/gpu/experts/test_experts.py": 3,
    "tests/worker/ops/gpu/test_compile.py::test_every_kernel_compiles_for_a_gpu_in_bf16": 0,
    "tests/worker/ops/gpu/test_program_order.py": 2,
    "tests/worker/ops/recurrent/test_short_conv.py": 3,
    "tests/worker/ops/test_attention.py": 8,
    "tests/worker/ops/test_imports.py": 1,
    "tests/worker/ops/test_operations.py": 4,
    "tests/worker/ops/test_operations.py::test_kernel_check_finds_no_wrong_operation": 0,
    "tests/worker/ops/test_quantize_dynamic.py": 4,
    "tests/worker/ops/test_sample.py": 6,
    "tests/worker/checkpoint/test_staging.py": 2,
    "tests/worker/distributed/test_bits.py": 1,
    "tests/worker/distributed/test_rehearsal.py": 0,
    "tests/worker/model_runner/test_kernel_check.py": 4,
}

COMPILES = "tests/worker/ops/gpu/test_compile.py::test_every_kernel_compiles_for_a_gpu_in_bf16"
TURNS = (  # of each group, one test runs in FULL=1, the next one the next day: a function, its case, or a file
    (
        "tests/worker/ops/cpu/test_sanitized.py",
        "tests/worker/distributed/test_rehearsal.py::test_ranks_are_checked_and_measured_and_serve",
    ),
    (
        "tests/worker/gpu/test_rehearsal.py::test_a_worker_serves_and_compiles_nothing_meanwhile",
        "tests/worker/gpu/test_rehearsal.py::test_the_bench_runs_to_its_end",
    ),
    *(
        tuple(f"{COMPILES}[{part}]" for part in parts)
        for parts in (("dense", "attention", "experts"), ("quantized", "launched"), ("dependent", "sampling"))
    ),
    (
        "tests/bench/gpu/test_command.py::test_gpu_command_runs_all_sections_on_the_cpu",
        "tests/bench/gpu/test_command.py::test_ranks_are_measured_beside_one_process",
        "tests/bench/real/test_main.py::test_formats_of_a_file_are_compared_with_its_full_model",
        "tests/bench/real/test_main.py::test_a_real_file_is_close_to_its_full_model",
    ),
)


def of_other_days(names: Sequence[str], day: date, turns: Sequence[Sequence[str]]) -> set[str]:
    """Returns the names of the tests whose turn comes on other days. turns: groups like those of TURNS"""
    others = {row for group in turns for row in group} - {group[day.toordinal() % len(group)] for group in turns}
    return {name for name in names if _row(name, dict.fromkeys(others, 0))}


def unread(root: Path, day: str, files: Mapping[str, int]) -> set[Path]:
    """Returns the test files that the sample of a day does not even import. files: a table like FILES."""
    names = [path.relative_to(root).as_posix() for row in files for path in _test_files(root / row)]
    drawn = _drawn(sorted({*names}), day, files, key=lambda name: _row(name, files) or name)
    return {root / name for name in {*names}.difference(drawn)}


def _test_files(place: Path) -> list[Path]:
    return [place] if place.suffix else [*place.rglob("test_*.py")]


def left_out(names: Sequence[str], day: str, cases: Mapping[str, int], tests: Mapping[str, int]) -> set[str]:
    """Returns the names of the tests that the sample of a day leaves out.

    The draw depends only on the day and the names, so all processes of one run draw the same tests.

    Args:
        names: pytest's node ids, `tests/x/test_y.py::test_z[case]`.
        day: any text; another text draws another sample.
        cases: a table like CASES.
        tests: a table like TESTS.
    """
    kept = _drawn(sorted(names), day, cases, key=_function)
    return set(names).difference(_drawn(kept, day, tests, key=lambda name: _row(name, tests) or name))


def _drawn(names: Sequence[str], day: str, table: Mapping[str, int], key: Callable[[str], str]) -> list[str]:
    """Draws as many names from each group as the table states for the group's key. Returns them in order."""
    kept: list[str] = []
    for group, members in groupby(sorted(names, key=key), key=key):
        together = list(members)
        row = _row(group, table)
        most = len(together) if row is None else min(table[row], len(together))
        kept += random.Random(f"{day} {group}").sample(together, most)
    return sorted(kept)


def _function(name: str) -> str:
    return name.partition("[")[0]


def _row(name: str, table: Mapping[str, int]) -> str | None:
    """Returns the longest key of the table that names this test, its function, its file or a parent folder."""
    return max(
        (key for key in table if f"{name}/".startswith((f"{key}/", f"{key}::", f"{key}["))), key=len, default=None
    )
