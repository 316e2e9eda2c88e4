"""The rank of a process, by the variables of torchrun and of LeaderWorkerSet; an error names the wrong variable."""

import re

import pytest

from shared.config.declaration import ConfigError
from shared.config.worker import WorkerConfig
from worker.distributed.rendezvous import Group, read_group

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}
LWS = {"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "s-0.s.ns"}


def group(starter: str, environment: dict[str, str], port: int = 0) -> Group:
    worker = WorkerConfig(tensor_parallel_size=2, rank_group=starter, rank_port=port)
    return read_group(worker, environment)


def test_variables_of_both_starters_are_read() -> None:
    assert group("torchrun", TORCHRUN) == Group(1, 2, "host-0", 29500)
    assert group("torchrun", TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}) == Group(
        1, 2, "host-0", 29500, here=2, place=1
    )
    assert group("lws", LWS | TORCHRUN) == Group(0, 2, "s-0.s.ns", 5557)
    own_store = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert group("torchrun", own_store, port=6000).port == group("lws", LWS, port=6000).port == 6000


def test_stages_times_processes_of_each_are_the_group() -> None:
    worker = WorkerConfig(tensor_parallel_size=2, pipeline_parallel_size=3, rank_group="torchrun")
    assert read_group(worker, TORCHRUN | {"WORLD_SIZE": "6"}).count == 6
    words = "--tensor-parallel-size 2 times --pipeline-parallel-size 3 is not the 2 of WORLD_SIZE"
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_group(worker, TORCHRUN)


@pytest.mark.parametrize(
    ("starter", "changed", "words"),
    [
        ("torchrun", {"RANK": ""}, "--rank-group torchrun reads the variable RANK, which is not set"),
        ("torchrun", {"MASTER_ADDR": ""}, "reads the variable MASTER_ADDR, which is not set"),
        ("torchrun", {"RANK": "2"}, "RANK must be a number from 0 to 1, not '2'"),
        ("torchrun", {"RANK": "-1"}, "RANK must be a number from 0 to 1, not '-1'"),
        ("torchrun", {"WORLD_SIZE": "4"}, "--tensor-parallel-size 2 is not the 4 of WORLD_SIZE"),
        ("torchrun", {"WORLD_SIZE": "1"}, "WORLD_SIZE must be a number from 2 to 128, not '1'"),
        ("torchrun", {"MASTER_PORT": "65535"}, "--rank-port 65535 leaves no 2 ports"),
        ("torchrun", {"MASTER_PORT": "http"}, "MASTER_PORT must be a number from 1 to 65535, not 'http'"),
        ("torchrun", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "--rank-port is needed, because torchrun itself"),
        ("torchrun", {"LOCAL_WORLD_SIZE": "2"}, "reads the variable LOCAL_RANK, which is not set"),
        ("lws", {"LWS_LEADER_ADDRESS": ""}, "--rank-group lws reads the variable LWS_LEADER_ADDRESS, which is not set"),
        ("lws", {"LWS_GROUP_SIZE": "3"}, "--tensor-parallel-size 2 is not the 3 of LWS_GROUP_SIZE"),
    ],
)
def test_wrong_variable_is_refused_by_name(starter: str, changed: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        group(starter, TORCHRUN | LWS | changed)
