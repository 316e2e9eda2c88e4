"""shared/metrics_page.py: the pages of frontends and workers together, as Prometheus reads them."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from frontend.app import create_app
from frontend.model_table import ModelTable, ServedModel
from frontend.observability.metrics import PrometheusMetrics
from frontend.request import Finish
from frontend.text.tokenizer import Tokenizer
from frontend.workers.connection import ConnectionCounters
from frontend.workers.membership import Discovery
from frontend.workers.pool import WorkerPool
from frontend.workers.status import ConnectionState, WorkerStatus
from shared.address import parse_all
from shared.config.frontend import ALIASES, FrontendConfig
from shared.config.settings import WireConfig
from shared.messages import Status
from tests.fakes import READY_STATUS
from tests.fakes import tokenizer as small_tokenizer
from tests.wire.harness import Worker, until
from worker.engine.metrics import DraftCollector, Metrics
from worker.scheduler.drafts import Speculation
from worker.scheduler.policy import SchedulerConfig

DOCS = Path(__file__).parents[2] / "docs/metrics.md"
NAME = "org/model"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Ready:
    def status(self) -> Status:
        return READY_STATUS


def samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def sums(pages: list[str]) -> Counter[str]:
    """Returns the result of Prometheus' `sum by (__name__)` over all targets."""
    total: Counter[str] = Counter()
    for page in pages:
        for name, _, value in samples(page):
            total[name] += value
    return total


def names(pages: list[str]) -> set[str]:
    return {family.name for page in pages for family in text_string_to_metric_families(page)}


def worker_page(metrics: Metrics, source: Ready | Worker) -> str:
    return generate_latest(metrics.scrape_registry(source)).decode()


async def pages_after(
    tmp_path: Path, tokenizer: Tokenizer, bodies: list[dict[str, object]]
) -> tuple[list[str], list[str]]:
    """Sends the bodies in turn to two frontends, which share two workers. Returns the pages of both kinds."""
    async with AsyncExitStack() as stack:
        folders = [tmp_path / "a", tmp_path / "b"]
        for folder in folders:
            folder.mkdir(mode=0o700)
        workers = [stack.enter_context(Worker(f, model=NAME, tokenizer_hash=tokenizer.hash)) for f in folders]
        loaded = asyncio.get_running_loop().create_future()
        loaded.set_result(tokenizer)
        clients = []
        for _ in range(2):
            pool = WorkerPool(WireConfig(), Discovery(parse_all(",".join(f"ipc://{f}" for f in folders))))
            await pool.start()
            stack.push_async_callback(pool.close)
            await until(lambda pool=pool: sum(worker.ready for worker in pool.membership.statuses()) == 2)
            config, metrics = FrontendConfig(access_log="off"), PrometheusMetrics(names=[NAME])
            model = ServedModel.of((NAME,), config, pool, loaded, metrics.models[NAME])
            transport = httpx.ASGITransport(create_app(config, ModelTable([model]), metrics))
            clients.append(
                await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://localhost"))
            )
        answers = await asyncio.gather(
            *(clients[i % 2].post("/v1/completions", json=body) for i, body in enumerate(bodies))
        )
        assert [answer.status_code for answer in answers] == [200] * len(bodies), answers[0].text
        await until(lambda: not any(worker.scheduler.has_work for worker in workers))
        frontends = [(await client.get("/metrics")).text for client in clients]
    return frontends, [worker_page(worker.metrics, worker) for worker in workers]


async def test_sums_over_two_frontends_and_two_workers_are_what_was_sent(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bodies = [{"model": NAME, "prompt": [5] * (3 + i), "max_tokens": 4 + i % 3, "ignore_eos": True} for i in range(24)]
    frontends, workers = await pages_after(tmp_path, tokenizer, bodies)
    total = sums(frontends + workers)
    generated = sum(4 + i % 3 for i in range(24))
    assert total["sluice_request_success_total"] == total["sluice_e2e_request_latency_seconds_count"] == 24
    assert total["sluice_prompt_tokens_total"] == total["sluice_request_prompt_tokens_sum"] == sum(range(3, 27))
    assert total["sluice_generation_tokens_total"] == total["sluice_sampled_tokens_total"] == generated
    assert total["sluice_request_generation_tokens_sum"] == generated
    assert total["sluice_request_inference_time_seconds_count"] == 24
    assert total["sluice_num_requests_running"] == total["sluice_num_requests_waiting"] == 0
    for page in frontends + workers:
        counted = sums([page])
        assert counted["sluice_request_success_total"] == 12 or counted["sluice_sampled_tokens_total"] > 0
        assert counted["sluice_build_info"] == 1
        assert {labels.get("model_name") for _, labels, _ in samples(page)} == {NAME}
    assert names(frontends) & names(workers) == {"sluice_build_info"}


def test_build_info_states_the_versions_that_run() -> None:
    [labels] = [labels for name, labels, _ in samples(worker_page(Metrics(), Ready())) if name == "sluice_build_info"]
    assert labels.keys() == {"version", "commit", "python", "torch"}
    assert labels["torch"][0].isdigit() and re.fullmatch("([0-9a-f]{12})?", labels["commit"])


def test_pages_with_the_prefix_of_vllm_have_its_names_and_labels() -> None:
    frontend = PrometheusMetrics("vllm:", [NAME])
    for finish in Finish:
        frontend.models[NAME].finished(finish, 1.0)
    pages = [frontend.text().decode(), worker_page(Metrics("vllm:", NAME, 16), Ready())]
    found = {name: (labels, value) for page in pages for name, labels, value in samples(page)}
    own = {"model_name": NAME, "engine": "0"}
    assert found["vllm:num_requests_running"] == (own, 2) and found["vllm:num_requests_waiting"] == (own, 1)
    assert found["vllm:kv_cache_usage_perc"] == (own, pytest.approx(3 / 7))
    assert found["vllm:cache_config_info"] == (own | {"block_size": "16", "num_gpu_blocks": "10"}, 1)
    ended = {labels["finished_reason"]: n for name, labels, n in samples(pages[0]) if "request_success_total" in name}
    assert ended == {"stop": len(Finish) - 1, "length": 1}
    assert names(pages[:1]) & names(pages[1:]) == {"sluice_build_info"}


OF_OTHERS: dict[str, dict[str, float]] = {
    "llama.cpp": {
        "llamacpp:prompt_tokens_total": 70, "llamacpp:prompt_tokens_cached_total": 41,
        "llamacpp:prompt_seconds_total": 3, "llamacpp:tokens_predicted_total": 12,
        "llamacpp:tokens_predicted_seconds_total": 6, "llamacpp:n_decode_total": 5,
        "llamacpp:requests_processing": 2, "llamacpp:requests_deferred": 8,
        "llamacpp:spec_decode_num_draft_tokens_total": 18, "llamacpp:spec_decode_num_accepted_tokens_total": 10,
        "llamacpp:spec_decode_num_drafts_total": 12, "llamacpp:prompt_tokens_seconds": 0,
        "llamacpp:predicted_tokens_seconds": 0, "llamacpp:kv_cache_usage_ratio": pytest.approx(6 / 14),
    },
    "sglang": {
        "sglang:num_running_reqs": 2, "sglang:num_queue_reqs": 8, "sglang:token_usage": pytest.approx(6 / 14),
        "sglang:cache_hit_rate": pytest.approx(41 / 105), "sglang:cached_tokens_total": 41,
        "sglang:prompt_tokens_total": 5, "sglang:generation_tokens_total": 7, "sglang:gen_throughput": 0,
        "sglang:time_to_first_token_seconds_count": 1, "sglang:inter_token_latency_seconds_count": 6,
        "sglang:e2e_request_latency_seconds_count": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("server", OF_OTHERS)
def test_aliases_add_the_names_of_other_servers(server: str) -> None:
    metrics = PrometheusMetrics(names=[NAME], aliases=server)
    first = msgspec.structs.replace(READY_STATUS, prefill_tokens=60, sampled_tokens=9, steps=4)
    computed = {"prefill_tokens": 10, "sampled_tokens": 3, "steps": 1}
    other = msgspec.structs.replace(READY_STATUS, running=0, waiting=7, prefix_queries=5, prefix_hits=1, **computed)
    model = metrics.models[NAME]
    model.admitted(5)
    model.first_tokens(3.0, 1)
    model.next_tokens(6.0, 6)
    model.finished(Finish.EOS, 9.0)
    model.flush(
        ConnectionCounters(), [WorkerStatus(s.model, ConnectionState.READY, "ready", s) for s in (first, other)]
    )
    prefix = ALIASES[server]
    found = {name: (labels, value) for name, labels, value in samples(metrics.text().decode())}
    told = {name: value for name, (_, value) in found.items() if name.startswith(prefix)}
    assert OF_OTHERS[server] == {name: value for name, value in told.items() if name in OF_OTHERS[server]}
    assert {name for name in told if not name.endswith(("_bucket", "_created", "_sum"))} == OF_OTHERS[server].keys()
    labels = {"model_name": NAME} if server == "sglang" else {}
    assert all({**found[name][0], "le": 0} == {**labels, "le": 0} for name in told), "llama.cpp's series have no labels"


def test_aliases_add_the_names_of_vllm_to_the_frontends_own() -> None:
    plain, both = PrometheusMetrics(names=[NAME]), PrometheusMetrics(names=[NAME], aliases="vllm")
    first = msgspec.structs.replace(READY_STATUS, page_size=16)
    other = msgspec.structs.replace(READY_STATUS, running=0, waiting=7, prefix_queries=5, prefix_hits=1)
    workers = [WorkerStatus(one.model, ConnectionState.READY, "ready", one) for one in (other, first)]
    for metrics in (plain, both):
        for finish in Finish:
            metrics.models[NAME].finished(finish, 1.0)
        metrics.models[NAME].admitted(5)
        metrics.models[NAME].flush(ConnectionCounters(), workers)
    own, said = (
        {(name, *sorted(labels.items())): value for name, labels, value in samples(metrics.text().decode())}
        for metrics in (plain, both)
    )
    added = {series: value for series, value in said.items() if series[0].startswith("vllm:")}
    assert {series[0] for series in said.keys() - added.keys()} == {series[0] for series in own}
    label = (("engine", "0"), ("model_name", NAME))
    assert all(set(label) <= set(series[1:]) for series in added)
    assert added["vllm:num_requests_running", *label] == 2 and added["vllm:num_requests_waiting", *label] == 8
    assert added["vllm:kv_cache_usage_perc", *label] == pytest.approx(6 / 14)
    assert added["vllm:prefix_cache_queries_total", *label] == 105
    assert added["vllm:prefix_cache_hits_total", *label] == 41
    assert added["vllm:cache_config_info", ("block_size", "16"), *label, ("num_gpu_blocks", "20")] == 1
    assert added["vllm:prompt_tokens_total", *label] == 5
    assert added["vllm:e2e_request_latency_seconds_count", *label] == len(Finish)
    ended = {dict(series[1:])["finished_reason"]: n for series, n in added.items() if "request_success_t" in series[0]}
    assert ended == {"stop": len(Finish) - 1, "length": 1}


def test_documented_names_of_vllm_are_exported_where_the_table_says() -> None:
    table = DOCS.read_text().partition("## vLLM's dashboards")[2]
    rows = re.findall(r"^\| `vllm:(\S+)` \| (frontend|worker) \|", table, re.MULTILINE)
    worker = Metrics("vllm:")
    worker.collectors.append(DraftCollector("vllm:", Speculation(SchedulerConfig(max_seq_len=64))))
    pages = {
        "frontend": PrometheusMetrics("vllm:").text().decode(),
        "worker": worker_page(worker, Ready()),
    }
    assert len(rows) > 15
    for name, process in rows:
        assert f"vllm:{name}".removesuffix("_total") in {
            name.removesuffix("_total") for name in names([pages[process]])
        }
