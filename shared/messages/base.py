"""Types that the messages of both directions share."""

from enum import StrEnum
from typing import Annotated

import msgspec

PROTOCOL_VERSION = 4
TOPIC_BYTES = 8  # length of a frontend's id, which is the topic of its events
BROADCAST = bytes(TOPIC_BYTES)  # the topic of Status, to which every frontend subscribes

U32 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]  # columns hold 32 bits, so the decoder checks the range

# Lists of ids in a message. The decoder refuses a longer list before it makes any of its elements, of which one takes
# up to 120 bytes. No vocabulary has more ids.
MAX_LIST_IDS = 1 << 19
MAX_FEW_IDS = 4096
Ids = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LIST_IDS)]
FewIds = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_FEW_IDS)]
IdSequences = Annotated[tuple[FewIds, ...], msgspec.Meta(max_length=MAX_FEW_IDS)]


class Outcome(StrEnum):
    """How a request ended. Every admitted request gets exactly one outcome."""

    EOS = "eos"
    STOP = "stop"  # a stop token (found by the worker) or a stop string (found by the frontend, which then aborts)
    LENGTH = "length"
    POOLED = "pooled"  # the vector that the request asked for instead of text was sent
    CHECKED = "checked"  # `Submit.answer` was recomputed to its end, or to the first id that differs
    ABORTED = "aborted"
    DEADLINE = "deadline"
    DEAD_END = "dead_end"  # the request's grammar or token rules allow no further token, or cost too much
    ERROR = "error"
    SHUTDOWN = "shutdown"


class Refusal(StrEnum):
    """Why a Submit was not admitted."""

    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    TOO_LONG = "context_length_exceeded"
    INVALID = "invalid"


class Message(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base of all messages: a tagged array. Fields may be added at the end, with a default."""
