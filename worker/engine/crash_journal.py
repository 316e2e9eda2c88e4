"""Whose step it was when a worker died: written before each step, read when a request comes to another worker.

A request gets a strike when a worker dies of a step that it was in. One with a strike is run alone until it has
made a token, which takes its strikes away: so it is known for certain who kills workers, two deaths are enough,
and whoever merely was near is acquitted. Who only waited, or whose worker was killed from outside, gets none.

Knows the layout of a heartbeat's body (all counts u32) and nothing of processes:

      0  step: how many, and the strikes each gets should this step be the last; 8  suspects: how many
     16  step: 12 bytes each, frontend id and request id; then suspects: the same and their strikes

The file of a dead worker is read by all workers whose files lie in the same folder, as its requests may go to any.
"""

import struct
from itertools import islice

from shared.heartbeat import Heartbeat
from worker.schedule.sequence import Key, Sequence

_STEP, _SUSPECTS = struct.Struct("<II"), struct.Struct("<I")
_KEY, _SUSPECT = struct.Struct("<8sI"), struct.Struct("<8sII")
_AT, _MOST = 16, 2048
_SUSPECTS_AT = _AT + _MOST * _KEY.size
_MOST_SUSPECTS = 1024


class CrashJournal:
    """One worker's own. With a heartbeat that has no file, what the frontends say of a request's crashes counts."""

    def __init__(self, heartbeat: Heartbeat | None = None) -> None:
        self._heartbeat = heartbeat or Heartbeat()
        self._step: list[Sequence] = []
        self._suspects = _accused(self._heartbeat)
        self._write_suspects()
        self.record_idle(force=True)
        self._heartbeat.blamed = False

    def crash_count(self, key: Key, crashes: int) -> int:
        """Of a request, by its `key` at its first worker; `crashes`: its frontend's count of workers that died since it
        made progress."""
        own = self._heartbeat.file
        if own is None:
            return crashes
        if not crashes:
            return 0
        others = (Heartbeat(file) for file in own.parent.glob("worker*") if file != own)
        return max(accused.get(key, 0) for accused in (self._suspects, *map(_accused, others)))

    def record_step(self, sequences: list[Sequence]) -> None:
        """These are in the next step, together."""
        if sequences == self._step:
            return
        self._step = sequences
        keys = b"".join([_KEY.pack(*sequence.original_key) for sequence in sequences[:_MOST]])
        self._heartbeat.body[_AT : _AT + len(keys)] = keys
        crash_count = 1 + max([sequence.crashes for sequence in sequences])
        _STEP.pack_into(self._heartbeat.body, 0, min(_MOST, len(sequences)), crash_count)

    def record_idle(self, *, force: bool = False) -> None:
        """No step runs."""
        if self._step or force:
            self._step = []
            _STEP.pack_into(self._heartbeat.body, 0, 0, 0)

    def clear(self, sequence: Sequence) -> None:
        """It has made progress, alone."""
        sequence.crashes, self._step = 0, []
        if self._suspects.pop(sequence.original_key, None) is not None:
            self._write_suspects()

    def _write_suspects(self) -> None:
        entries = list(islice(self._suspects.items(), _MOST_SUSPECTS))
        data = b"".join([_SUSPECT.pack(*key, crash_count) for key, crash_count in entries])
        self._heartbeat.body[_SUSPECTS_AT : _SUSPECTS_AT + len(data)] = data
        _SUSPECTS.pack_into(self._heartbeat.body, 8, len(entries))


def _accused(heartbeat: Heartbeat) -> dict[Key, int]:
    """What a file says of the dead: those of the last step first, if it was what killed them."""
    last = _last_step(heartbeat) if heartbeat.blamed else {}
    return last | {key: crash_count for key, crash_count in _older(heartbeat).items() if key not in last}


def _last_step(heartbeat: Heartbeat) -> dict[Key, int]:
    count, crash_count = _STEP.unpack_from(heartbeat.body, 0)
    keys = _KEY.iter_unpack(heartbeat.body[_AT : _AT + count * _KEY.size])
    return {(frontend, id): crash_count for frontend, id in keys}


def _older(heartbeat: Heartbeat) -> dict[Key, int]:
    (count,) = _SUSPECTS.unpack_from(heartbeat.body, 8)
    entries = _SUSPECT.iter_unpack(heartbeat.body[_SUSPECTS_AT : _SUSPECTS_AT + count * _SUSPECT.size])
    return {(frontend, id): crash_count for frontend, id, crash_count in entries}
