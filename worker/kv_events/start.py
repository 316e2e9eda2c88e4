"""Starts the publisher of a worker's K/V events, according to the settings."""

import socket

import zmq

from shared.config import ConfigError, Settings
from worker.kv_events.journal import PageJournal
from worker.kv_events.publisher import KvEventPublisher
from worker.schedule.paging import Paging


def start(settings: Settings, paging: Paging) -> KvEventPublisher:
    """Returns a running publisher. Raises ConfigError if an endpoint cannot be used."""
    worker, model = settings.worker, settings.model
    name = (model.served_model_name or model.model).split(",")[0]
    topic = f"kv@{worker.kv_events_pod or socket.gethostname()}@{name}"
    journal = PageJournal.of(paging)
    try:
        publisher = KvEventPublisher.open(journal, topic, worker.kv_events_endpoint, worker.kv_events_replay_endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"--kv-events-endpoint {worker.kv_events_endpoint} or --kv-events-replay-endpoint "
            f"{worker.kv_events_replay_endpoint!r} cannot be used: {error.strerror}"
        ) from error
    publisher.start()
    return publisher
