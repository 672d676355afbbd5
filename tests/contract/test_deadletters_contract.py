"""What every `ports.DeadLetters` promises that can let go of a file [Q1]."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from archiver.deadletters.setup import dead_letters
from archiver.domain.routing import Router
from archiver.inbox import QueueInbox
from archiver.ports import DeadLetters, DeadLettersWritten, FileDamaged
from archiver.settings.models import Dlq
from tests.harness.kafka import KafkaServer
from tests.harness.process import wait_until
from tests.unit.refused_files import Heard, answers, refuse, remove

CASES = ["kafka_only", "file_only", "cascade", "fan_out", "kept"]


def make_route_of() -> Callable[[str, bytes], str]:
    return Router(["_org_id"], "default", with_topic=True).route_of


class Case:
    """One implementation, and how many records can be found where it puts them."""

    def __init__(self, name: str, folder: Path, request: pytest.FixtureRequest) -> None:
        self.inbox = QueueInbox()
        self.heard = Heard()
        self.folder = folder
        self._topic = f"dlq-{uuid.uuid4().hex[:8]}"
        self._kafka: KafkaServer | None = None
        properties: dict[str, str] = {}
        if name not in ("file_only", "kept"):
            kafka: KafkaServer = request.getfixturevalue("kafka")
            kafka.create_topic(self._topic)
            properties = {"bootstrap.servers": kafka.bootstrap}
            self._kafka = kafka
        dlq = Dlq(enabled=False) if name == "kept" else Dlq(enabled=True, mode=name, topic=self._topic)  # type: ignore[arg-type]
        self.dead_letters: DeadLetters = dead_letters(
            dlq, folder, properties, None if name == "kept" else make_route_of, self.inbox, self.heard, remove
        )

    def findable(self) -> int:
        """Records in the topic, the dead letter files and the kept files, each counted where it is."""
        found = sum(path.read_bytes().count(b"\n") for path in (self.folder / "dlq").glob("*.jsonl"))
        kept = [path for path in (self.folder / "refused").glob("*") if path.suffix != ".json"]
        if self._kafka is not None:
            found += self._kafka.end_offsets(self._topic)[0]
        return found + sum(path.read_bytes().count(b"\n") for path in kept)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    made = Case(request.param, tmp_path, request)
    yield made
    made.dead_letters.close(10)


def test_it_answers_once_and_then_every_record_is_where_it_can_be_found(case: Case) -> None:
    refused = refuse(case.folder / "uploads", [[b"a", b"b"], [b"c"]], codec="none")
    case.dead_letters.submit(refused)
    assert answers(case.inbox, lambda got: len(got) == 1, 30) == [DeadLettersWritten(1)]
    copies = {reason_outcome[1] for reason_outcome in case.heard.outcomes()}
    assert case.findable() == 3 * len(copies)
    assert not refused.sealed.path.exists()


def test_every_file_is_answered_under_its_own_number(case: Case) -> None:
    for file_id in range(5):
        case.dead_letters.submit(refuse(case.folder / "uploads", [[b"a"]], file_id=file_id))
    results = answers(case.inbox, lambda got: len(got) == 5, 60)
    assert results == [DeadLettersWritten(file_id) for file_id in range(5)]


def test_a_vanished_file_is_never_answered_as_written(case: Case) -> None:
    """[D10]"""
    refused = refuse(case.folder / "uploads", [[b"a"]])
    refused.sealed.path.unlink()
    case.dead_letters.submit(refused)
    (result,) = answers(case.inbox, lambda got: len(got) == 1, 30)
    assert isinstance(result, FileDamaged)
    assert case.findable() == 0


def test_an_abandoned_file_leaves_the_spool(case: Case) -> None:
    """[D5]"""
    refused = refuse(case.folder / "uploads", [[b"a"]])
    case.dead_letters.submit(refused)
    case.dead_letters.abandon(1)
    wait_until(lambda: not refused.sealed.path.exists(), 30, "the file is gone")


def test_close_can_be_called_twice_and_ends_soon(case: Case) -> None:
    case.dead_letters.close(10)
    case.dead_letters.close(10)
    assert case.inbox.drain() == []
