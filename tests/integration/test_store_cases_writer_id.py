"""Two archivers that drew the same writer id, on one destination: nothing is replaced or lost ([K4]).

The daemon offers no way to choose its id, so the parts that make and take keys run here without it.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from archiver.app import SystemClock
from archiver.domain.keys import KeyMaker, KeyTemplate
from archiver.domain.sealed import SealedFile
from archiver.inbox import QueueInbox
from archiver.ports import FileDurable, WriterIdTaken
from archiver.settings.load import load
from archiver.stores import open_store
from archiver.stores.metadata import object_metadata
from archiver.uploads import UploadPool, UploadSchedule
from tests.contract.store_case import make_sealed
from tests.harness.daemon import wait_until
from tests.harness.fault_proxy import LoseAnswer
from tests.integration.store_sides import MIB, SCHEMES, MakeSide, StoreSide, uploads

FILES = 12


class Replica:
    """Keys, uploads and a store of one archiver; its first writer id is `3f9a`, as everybody's here."""

    def __init__(self, side: StoreSide, folder: Path) -> None:
        options = side.settings()
        given = [f"{part}.{key}={text}" for part, keys in options.items() for key, text in keys.items()]
        settings = load(None, {}, ["kafka.topics=events", *given]).settings
        self.inbox = QueueInbox()
        self.store = open_store(settings, lambda event: None)
        self.keys = KeyMaker(KeyTemplate("{year}"), "jsonl.zst", self._new_id)
        self.folder = folder
        self.removed: list[int] = []
        self.durable: list[int] = []
        schedule = UploadSchedule(
            self.inbox,
            lambda event: None,
            lambda sealed: self.removed.append(sealed.file_id),
            lambda: secrets.token_hex(6),
            random.Random(1),
            4,
        )
        self.pool = UploadPool(
            schedule,
            self.store,
            lambda sealed: object_metadata(sealed, "test"),
            SystemClock(),
            self.inbox,
            parallelism=4,
        )

    @staticmethod
    def _new_id(digits: int) -> str:
        return "3f9a" if digits == 4 else secrets.token_hex(6)

    def seal(self, content: bytes, route: str) -> SealedFile:
        """A sealed file under this writer's next key of a route."""
        sealed = make_sealed(self.folder, content)
        return replace(sealed, key=self.keys.next(route, time.time()))

    def settle(self) -> None:
        """What the pipeline does with the answers."""
        for result in self.inbox.drain():
            if isinstance(result, WriterIdTaken):
                self.keys.rename()
            else:
                assert isinstance(result, FileDurable), result
                self.durable.append(result.file_id)


@contextmanager
def replicas(side: StoreSide, folder: Path) -> Iterator[list[Replica]]:
    both = [Replica(side, folder / name) for name in "ab"]
    try:
        yield both
    finally:
        for one in both:
            one.pool.close(10)
            one.store.close()


def wait_for(one: Replica, files: int) -> None:
    """Wait until so many files of a replica are durable."""

    def done() -> bool:
        one.settle()
        return len(one.durable) == files

    wait_until(done, 30, f"{files} durable files")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_archivers_with_one_writer_id_keep_every_file_of_both(
    scheme: str, make_side: MakeSide, tmp_path: Path
) -> None:
    """[K4]: at the same time, under the same keys, among them files with the very same bytes."""
    side = make_side(scheme)
    contents: Counter[bytes] = Counter()
    with replicas(side, tmp_path) as both:
        for n in range(FILES):
            for name, one in zip("ab", both, strict=True):
                # every third one is the same on both: only the nonce tells whose it is
                content = f"{'both' if n % 3 == 0 else name} {n} {'x' * n * 100}".encode()
                contents[content] += 1
                one.pool.submit(one.seal(content, f"events/org-{n % 4}"))
        for one in both:
            wait_for(one, FILES)
            assert sorted(one.removed) == sorted(one.durable)
        assert any(one.keys.writer_id != "3f9a" for one in both)
    assert Counter(side.objects().values()) == contents


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_a_file_in_parts_does_not_replace_the_other_archivers(
    scheme: str, make_side: MakeSide, tmp_path: Path
) -> None:
    """[K4], [S5]: one after the other, under one key."""
    side = make_side(scheme)
    contents = [secrets.token_bytes(MIB) * 6 + bytes([n]) for n in range(2)]
    with replicas(side, tmp_path) as both:
        for one, content in zip(both, contents, strict=True):
            one.pool.submit(one.seal(content, "events/org"))
            wait_for(one, 1)
    assert sorted(side.objects().values()) == sorted(contents)
    assert side.leftovers() == []


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_lost_answer_is_told_from_another_archivers_object_by_the_nonce(
    scheme: str, make_side: MakeSide, tmp_path: Path
) -> None:
    """[K4]: A's upload arrives, its answer does not; B has the same bytes under the same key."""
    side = make_side(scheme)
    with replicas(side, tmp_path) as (first, second):
        first.store.probe()
        second.store.probe()
        side.proxy.fail(LoseAnswer(), when=uploads(side))
        first.pool.submit(first.seal(b"the same bytes", "events/org"))
        wait_until(side.archive_keys, 10, "the upload whose answer was lost")
        second.pool.submit(second.seal(b"the same bytes", "events/org"))
        for one in (first, second):
            wait_for(one, 1)
    assert len(side.archive_keys()) == 2
    assert sum("-3f9a." in key for key in side.archive_keys()) == 1
