"""One attempt to bring a refused file's records to the DLQ, as `dlq.mode` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from archiver.deadletters.letters import RecordReader, Sink, Stopping
from archiver.errors import DeadLetterError
from archiver.events import DeadLettered
from archiver.ports import Emit, RefusedFile

Mode = Literal["kafka_only", "file_only", "cascade", "fan_out"]


class RecordDelivery:
    """Reads the records and writes them to the sinks.

    `fan_out` needs every sink, and does not write again to one that has confirmed; any other mode takes
    the first sink that confirms, in the order given.
    """

    def __init__(self, reader: RecordReader, sinks: Sequence[Sink], mode: Mode, emit: Emit) -> None:
        self._reader = reader
        self._sinks = sinks
        self._every_sink = mode == "fan_out"
        self._emit = emit
        self._confirmed: dict[int, set[str]] = {}

    def deliver(self, refused: RefusedFile, attempt: int, stopping: Stopping) -> None:
        letters = self._reader.open(refused, attempt, stopping)
        file_id = refused.sealed.file_id
        done = self._confirmed.setdefault(file_id, set())
        failures = []
        for sink in self._sinks:
            if sink.name in done:
                continue
            try:
                written = sink.write(refused, letters(), stopping)
            except DeadLetterError as error:
                failures.append(str(error))
                self._tell(refused, "failed", refused.sealed.records, str(error))
                continue
            done.add(sink.name)
            self._tell(refused, sink.name, written, refused.detail)
            if not self._every_sink:
                break
        if failures and (self._every_sink or not done):
            raise DeadLetterError("; ".join(failures))
        del self._confirmed[file_id]

    def _tell(self, refused: RefusedFile, outcome: str, records: int, detail: str) -> None:
        self._emit(DeadLettered(refused.reason, outcome, records, str(refused.sealed.key), detail))
