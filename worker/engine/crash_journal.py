"""Records which requests were in the running step when a worker died.

The journal is written before each step and read when a request comes to another worker. When a worker dies in a step,
the crash count of every request in that step grows by one. A request with a crash count runs in steps of its own until
it has produced a token, which resets the count. The second death therefore proves which request kills workers, and the
other requests of the first step are cleared. A request that only waited gets no count, and neither does any request of
a worker that was killed from outside (heartbeat.blamed is then False).

The journal is stored in the body of the heartbeat file. Byte offsets (all counts are u32):

      0  the number of requests in the step, and the crash count that each gets if the worker dies in this step
      8  the number of suspects
     16  the requests in the step, 12 bytes each: frontend id and request id
     then the suspects, 16 bytes each: frontend id, request id, crash count

The file of a dead worker is read by all workers whose files are in the same folder, because its requests may go to any
of them.
"""

import struct
from itertools import islice

from shared.heartbeat import Heartbeat
from worker.scheduler.sequence import Key, Sequence

_STEP, _SUSPECTS = struct.Struct("<II"), struct.Struct("<I")
_KEY, _SUSPECT = struct.Struct("<8sI"), struct.Struct("<8sII")
_STEP_OFFSET, _MAX_STEP = 16, 2048
_SUSPECTS_COUNT_OFFSET, _SUSPECTS_OFFSET, _MAX_SUSPECTS = 8, _STEP_OFFSET + _MAX_STEP * _KEY.size, 1024


class CrashJournal:
    """The journal of this worker. If the heartbeat has no file, the crash counts that frontends report are used."""

    def __init__(self, heartbeat: Heartbeat | None = None) -> None:
        self._heartbeat = heartbeat or Heartbeat()
        self._step: list[Sequence] = []
        self._suspects = _crash_counts(self._heartbeat)
        self._write_suspects()
        self.record_idle(force=True)
        self._heartbeat.blamed = False

    def crash_count(self, key: Key, reported: int) -> int:
        """Returns how many workers have died in a step with this request since the request last made progress.

        key: the key of the request at its first worker.
        reported: the frontend's count of workers that died while they had this request.
        """
        own = self._heartbeat.file
        if own is None:
            return reported
        if not reported:
            return 0
        others = (Heartbeat(file) for file in own.parent.glob("worker*") if file != own)
        return max(counts.get(key, 0) for counts in (self._suspects, *map(_crash_counts, others)))

    def record_step(self, sequences: list[Sequence]) -> None:
        """Records that the next step consists of these sequences."""
        if sequences == self._step:
            return
        self._step = sequences
        keys = b"".join([_KEY.pack(*_original_key(sequence)) for sequence in sequences[:_MAX_STEP]])
        self._heartbeat.body[_STEP_OFFSET : _STEP_OFFSET + len(keys)] = keys
        crash_count = 1 + max([sequence.history.crashes for sequence in sequences])
        _STEP.pack_into(self._heartbeat.body, 0, min(_MAX_STEP, len(sequences)), crash_count)

    def record_idle(self, *, force: bool = False) -> None:
        """Records that no step runs."""
        if self._step or force:
            self._step = []
            _STEP.pack_into(self._heartbeat.body, 0, 0, 0)

    def clear(self, sequence: Sequence) -> None:
        """Resets the crash count of a sequence that has produced a token in a step of its own."""
        sequence.history.crashes, self._step = 0, []
        if self._suspects.pop(_original_key(sequence), None) is not None:
            self._write_suspects()

    def _write_suspects(self) -> None:
        entries = list(islice(self._suspects.items(), _MAX_SUSPECTS))
        data = b"".join([_SUSPECT.pack(*key, crash_count) for key, crash_count in entries])
        self._heartbeat.body[_SUSPECTS_OFFSET : _SUSPECTS_OFFSET + len(data)] = data
        _SUSPECTS.pack_into(self._heartbeat.body, _SUSPECTS_COUNT_OFFSET, len(entries))


def _original_key(sequence: Sequence) -> Key:
    """Returns the key that the sequence had at its first worker."""
    return sequence.key[0], sequence.history.original_id or sequence.key[1]


def _crash_counts(heartbeat: Heartbeat) -> dict[Key, int]:
    """Returns the crash count of each request in a file. A step that killed the worker has newer counts, which win."""
    last = _last_step(heartbeat) if heartbeat.blamed else {}
    return last | {key: crash_count for key, crash_count in _suspects(heartbeat).items() if key not in last}


def _last_step(heartbeat: Heartbeat) -> dict[Key, int]:
    count, crash_count = _STEP.unpack_from(heartbeat.body, 0)
    keys = _KEY.iter_unpack(heartbeat.body[_STEP_OFFSET : _STEP_OFFSET + count * _KEY.size])
    return {(frontend, id): crash_count for frontend, id in keys}


def _suspects(heartbeat: Heartbeat) -> dict[Key, int]:
    (count,) = _SUSPECTS.unpack_from(heartbeat.body, _SUSPECTS_COUNT_OFFSET)
    entries = _SUSPECT.iter_unpack(heartbeat.body[_SUSPECTS_OFFSET : _SUSPECTS_OFFSET + count * _SUSPECT.size])
    return {(frontend, id): crash_count for frontend, id, crash_count in entries}
