"""A steady load whose every record can be worked out again from its number, so none has to be kept."""

from __future__ import annotations

import re
import threading
import time
from array import array
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaError, Message, Producer

from tests.harness.kafka import KafkaServer
from tests.harness.process import ServerError

_NUMBER = re.compile(rb'"n":(\d+)')


class Load:
    """Produces from a thread of its own. Record `n` goes to partition `n % partitions`, in order.

    `offsets[n]` is where the broker has put it, −1 while that is not known.
    """

    def __init__(
        self, kafka: KafkaServer, topic: str, *, partitions: int, orgs: int, per_sec: int, padding: int = 120
    ) -> None:
        self.topic = topic
        self.partitions = partitions
        self.orgs = orgs
        self.per_sec = per_sec
        self.offsets = array("q")
        self._padding = padding
        self._failures: list[str] = []
        self._running = threading.Event()
        self._ended = False
        self._producer = Producer(
            {
                "bootstrap.servers": kafka.bootstrap,
                "enable.idempotence": True,
                "linger.ms": 20,
                "queue.buffering.max.messages": 0,
                "log_level": 0,
            }
        )
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def value(self, n: int) -> bytes:
        """The bytes of record `n`."""
        noise = (n * 2_654_435_761) % 4_294_967_296
        text = f'{{"_org_id":"org-{self.org(n)}","n":{n},"noise":"{noise:x}","text":"'
        return (text + "lorem ipsum "[n % 12 :] * (self._padding // 12) + '"}').encode()

    def org(self, n: int) -> int:
        """Not in step with the partitions, so that every organisation is in every partition."""
        return (n // self.partitions + n * 7 % 5) % self.orgs

    def route(self, n: int) -> str:
        """Where record `n` belongs."""
        return f"{self.topic}/org-{self.org(n)}"

    def number(self, line: bytes) -> int | None:
        """The number of a record that looks like one of ours."""
        found = _NUMBER.search(line)
        return int(found[1]) if found else None

    def _run(self) -> None:
        started, count = time.monotonic(), 0
        while not self._ended:
            if not self._running.is_set():
                self._producer.poll(0.1)
                started, count = time.monotonic(), 0
                continue
            due = int((time.monotonic() - started) * self.per_sec) - count
            for _ in range(min(due, 5_000)):
                self._produce()
                count += 1
            self._producer.poll(0.01)

    def _produce(self) -> None:
        n = len(self.offsets)
        self.offsets.append(-1)

        def answered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failures.append(str(error))
            else:
                self.offsets[n] = message.offset() or 0

        self._producer.produce(self.topic, self.value(n), partition=n % self.partitions, on_delivery=answered)

    def go(self) -> None:
        """Produce from now on."""
        self._running.set()

    def rest(self) -> None:
        """Produce nothing until `go`."""
        self._running.clear()

    def end(self) -> int:
        """Stop; how many records the broker has acknowledged, which must be all of them."""
        self._ended = True
        self._thread.join()
        if self._producer.flush(60) or self._failures or -1 in self.offsets:
            raise ServerError(f"records were not acknowledged: {self._failures[:3]}")
        return len(self.offsets)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._thread.join()
