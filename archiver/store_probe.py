"""Tries the store at start, until it answers once ([S3], [O2]): records need not wait for that."""

from __future__ import annotations

import threading

from archiver.errors import StoreError, TransientStoreError
from archiver.events import StoreProbed, StoreProbeFailed
from archiver.ports import Emit, Store

RETRY_SECS = 10.0


class StartProbe:
    """A thread that ends with the first answer. `problem` says in words why the store is not ready."""

    def __init__(self, store: Store, emit: Emit) -> None:
        self._store = store
        self._emit = emit
        self._stopping = threading.Event()
        self._problem: str | None = "it has not answered yet"
        threading.Thread(target=self._run, name="store-probe", daemon=True).start()

    def problem(self) -> str | None:
        """None once the store has answered."""
        return self._problem

    def stop(self) -> None:
        """Try no more."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                report = self._store.probe()
            except StoreError as error:
                kind = error.kind if isinstance(error, TransientStoreError) else "refused"
                self._problem = str(error)
                self._emit(StoreProbeFailed(kind=kind, detail=str(error)))
                self._stopping.wait(RETRY_SECS)
                continue
            self._problem = None
            self._emit(StoreProbed(create_only=report.create_only, detail=report.detail))
            return
