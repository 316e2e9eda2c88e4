"""Decides which sequences are accepted at all. Scheduler.plan() decides everything else about them."""

from shared.messages import Refusal
from worker.schedule.paging import Paging
from worker.schedule.policy import SchedulerConfig
from worker.schedule.queue import WaitingQueue
from worker.schedule.sequence import Sequence

RESERVED_SHARE = 8  # 1 / RESERVED_SHARE of the queue is kept for tenants with few or no requests in it


class Refused(Exception):
    """The sequence is not accepted. The client gets `reason` and the message."""

    reason = Refusal.INVALID


class QueueFull(Refused):
    reason = Refusal.QUEUE_FULL


class TooLong(Refused):
    reason = Refusal.TOO_LONG


def check_possible(sequence: Sequence, config: SchedulerConfig, paging: Paging) -> None:
    """Raises Refused if the sequence could not finish even if it were alone on the worker."""
    if sequence.prompt_len < 1 or sequence.output_len < 0:
        raise Refused("`prompt` is empty")
    tokens = sequence.known_len
    longest = sequence.prompt_len + sequence.sampling.max_tokens
    if max(longest, tokens) > config.max_seq_len:
        raise TooLong(f"`prompt` and `max_tokens` are {longest} tokens, but at most {config.max_seq_len} are possible")
    if not paging.fits(max(longest - 1, tokens)):  # the K/V of the last token is never needed
        raise TooLong(f"`prompt` and `max_tokens` are {longest} tokens, which is more than the K/V pool can hold")


def check_queue(sequence: Sequence, config: SchedulerConfig, queue: WaitingQueue, running: int) -> None:
    """Raises QueueFull if too many sequences or tokens wait, or if the tenant has more than its share of the queue.

    A sequence is always accepted if no sequence waits and running sequences do not fill a batch.
    """
    waiting = len(queue)
    if waiting >= config.max_waiting_requests and (waiting or running >= config.max_batch_size):
        raise QueueFull(f"{waiting} requests are waiting, and at most {config.max_waiting_requests} may wait")
    if waiting and 0 < config.max_waiting_tokens < queue.tokens + sequence.known_len:
        raise QueueFull(f"{queue.tokens} prompt tokens are waiting, and at most {config.max_waiting_tokens} may wait")
    if sequence.turn.tenant:
        _check_share(sequence, config, queue)


def _check_share(sequence: Sequence, config: SchedulerConfig, queue: WaitingQueue) -> None:
    """Raises QueueFull if the tenant's waiting requests or tokens are at least seven times the free space of the queue.

    One waiting request per tenant is always allowed. One tenant alone can therefore fill seven eighths of the queue,
    and two tenants can fill nearly half of it each. A new tenant always finds a place.
    """
    requests, tokens = queue.tenants.waiting(sequence.turn.tenant)
    ratio = RESERVED_SHARE - 1
    if requests and requests >= ratio * (config.max_waiting_requests - len(queue) - 1):
        raise QueueFull(
            f"{requests} requests of {sequence.turn.tenant} are waiting; other places are kept for other keys"
        )
    free = config.max_waiting_tokens - queue.tokens - sequence.known_len
    if requests and config.max_waiting_tokens and tokens >= ratio * free:
        raise QueueFull(
            f"{tokens} prompt tokens of {sequence.turn.tenant} are waiting; the rest is kept for other keys"
        )
