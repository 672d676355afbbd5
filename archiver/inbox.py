"""The queue on which workers answer the pipeline."""

from __future__ import annotations

from queue import Empty, SimpleQueue

from archiver.ports import Result


class QueueInbox:
    """Implements `ports.Inbox`: any number of threads put, one thread takes."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Result] = SimpleQueue()

    def put(self, result: Result) -> None:
        """Never blocks; may be called from a signal handler."""
        self._queue.put(result)

    def drain(self) -> list[Result]:
        """All that is there, at once; called in every turn of the loop, so cheap when empty."""
        # Only this thread takes, so what is counted is still there.
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def wait(self, timeout_secs: float) -> list[Result]:
        """All that is there, waiting for the first one up to `timeout_secs`."""
        try:
            first = self._queue.get(timeout=max(0.0, timeout_secs))
        except Empty:
            return []
        return [first, *self.drain()]
