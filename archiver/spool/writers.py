"""Threads that compress and append. Implements `ports.Writers`.

Each thread has its own queue, compressor, files and share of the file handles; a file belongs to one
thread by its id, which is what keeps its frames in order. Nothing is shared but the inbox.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType

from archiver.codecs import Codec
from archiver.domain.sealed import ObjectKey
from archiver.errors import SpoolError
from archiver.events import SpoolWriteFailed
from archiver.ports import Emit, FileSealed, FrameWritten, Inbox, SealFailed, WorkerDied, WriteFailed
from archiver.spool.directory import SpoolDirectory
from archiver.spool.file import CHECKSUMS, SpoolFile, append_to_each, fsync_directory, is_no_space
from archiver.spool.labels import Label, label_path, sync_label, write_label

_HANDLES_KEPT_FREE = 64
"""[B3]: for sockets, the log, and what libraries open."""

_TOGETHER_BYTES = 512 * 1024
_TOGETHER_MAX = 64
"""How many frames are made and written in one go, and of how many bytes before compression. They are answered
together, so that more would keep the loop waiting."""

_Command = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Append:
    """Lines (at least one run) that become one frame."""

    file_id: int
    chunk: int
    lines: list[bytes]

    @property
    def size(self) -> int:
        """Bytes before compression."""
        return sum(map(len, self.lines)) + len(self.lines)


@dataclass(frozen=True, slots=True)
class _Order:
    """How a thread is to write, the same for all of them. `handles_max` is one thread's share.

    `run_id` is unique everywhere and starts the names of this run's files, so that they cannot meet
    an earlier run's leftovers.
    """

    directory: SpoolDirectory
    codec: Codec
    level: int | None
    handles_max: int
    keep_labels: bool
    checksums: frozenset[str]
    run_id: str


def open_files_max(configured: int) -> int:
    """How many archive files may be open at once: as configured, within the process's limit [B3]."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return configured
    return max(1, min(configured, limit - _HANDLES_KEPT_FREE))


class SpoolWriters:
    """`threads` writer threads over one spool; they start at once.

    `level` None is the codec's own. `max_open_files` is the sum over all threads, within the process's
    limit. `checksums` are asked for beside CRC-32. With `keep_labels` a sealed file survives a power cut and
    a later process can upload it (where nobody will send its records again).
    """

    def __init__(
        self,
        directory: SpoolDirectory,
        codec: Codec,
        level: int | None,
        inbox: Inbox,
        emit: Emit,
        *,
        threads: int = 2,
        max_open_files: int = 256,
        checksums: frozenset[str] = frozenset(),
        keep_labels: bool = False,
    ) -> None:
        if not checksums <= CHECKSUMS:
            raise ValueError(f"unknown checksums {sorted(checksums - CHECKSUMS)}")
        handles = open_files_max(max_open_files)
        threads = min(threads, handles)
        run_id = secrets.token_hex(8)
        order = _Order(directory, codec, level, handles // threads, keep_labels, checksums, run_id)
        self._keep_labels = keep_labels
        self._workers = [_Worker(f"writer-{n}", order, inbox, emit) for n in range(threads)]

    def append(self, file_id: int, chunk: int, lines: list[bytes]) -> None:
        """Append the lines (at least one run) as one frame. Answer: FrameWritten or WriteFailed."""
        worker = self._workers[file_id % len(self._workers)]
        worker.queue.put(_Append(file_id, chunk, lines))

    def seal(self, file_id: int) -> None:
        """Close for good, move under `uploads/`. Answer: FileSealed or SealFailed."""
        worker = self._workers[file_id % len(self._workers)]
        worker.queue.put(partial(worker.seal, file_id))

    def discard(self, file_id: int) -> None:
        """Delete the file, open or just sealed, and forget it. No answer."""
        worker = self._workers[file_id % len(self._workers)]
        worker.queue.put(partial(worker.discard, file_id))

    def label(self, file_id: int, key: ObjectKey) -> None:
        """The key the file will have. Call it before the first append: no frame is written unlabelled."""
        if self._keep_labels:
            worker = self._workers[file_id % len(self._workers)]
            worker.queue.put(partial(worker.label, file_id, key))

    def close(self, timeout_secs: float) -> None:
        """Carry out what is queued, then end the threads; what takes longer is left to the next start."""
        deadline = time.monotonic() + timeout_secs
        for worker in self._workers:
            worker.queue.put(None)
        for worker in self._workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))


class _DeathNotice:
    """Tells the pipeline when a thread ends by an error; the error itself goes on to the thread's hook."""

    def __init__(self, worker: str, inbox: Inbox) -> None:
        self._worker = worker
        self._inbox = inbox

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f" ({trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno})" if trace else ""
        self._inbox.put(WorkerDied(self._worker, f"{kind.__name__}: {error}{where}"))


class _Worker:
    """One thread and everything it owns; every method but `__init__` runs on that thread."""

    def __init__(self, name: str, order: _Order, inbox: Inbox, emit: Emit) -> None:
        self.queue: SimpleQueue[_Append | _Command | None] = SimpleQueue()
        self._ahead: list[_Append | _Command | None] = []  # at most one, taken out of the queue already
        self._order = order
        self._open_dir = order.directory.open_dir
        self._compressor = order.codec.compressor(order.level)
        self._inbox = inbox
        self._emit = emit
        self._files: dict[int, SpoolFile] = {}
        self._handles: OrderedDict[int, SpoolFile] = OrderedDict()  # open ones, longest unused first
        self._labels_due: dict[int, Label] = {}  # not on disk yet
        self._labelled: set[int] = set()
        self._failures = 0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with _DeathNotice(self.thread.name, self._inbox):
            while (command := self._next()) is not None:
                if isinstance(command, _Append):
                    self.append(self._together(command))
                else:
                    command()
            for file in self._handles.values():
                file.close()

    def _next(self) -> _Append | _Command | None:
        return self._ahead.pop() if self._ahead else self.queue.get()

    def _together(self, first: _Append) -> list[_Append]:
        """With it what is small, waits right behind it, and is another file's.

        What is large is made alone: the small ones' answers do not wait for it, and zstd compresses several
        in a context of their own, which for a large frame takes hundreds of MiB beside the worker's.
        """
        appends, file_ids = [first], {first.file_id}
        size = first.size
        while size < _TOGETHER_BYTES and len(appends) < _TOGETHER_MAX:
            try:
                command = self.queue.get_nowait()
            except Empty:
                break
            if not isinstance(command, _Append) or command.file_id in file_ids:
                self._ahead.append(command)
                break
            size += command.size
            if size > _TOGETHER_BYTES:
                self._ahead.append(command)
                break
            appends.append(command)
            file_ids.add(command.file_id)
        return appends

    # --- commands ---------------------------------------------------------------------------

    def append(self, appends: list[_Append]) -> None:
        """One frame to each of as many files."""
        due: list[tuple[_Append, SpoolFile]] = []
        for append in appends:
            file = self._files.get(append.file_id) or self._new(append.file_id)
            if file.failure is None:
                due.append((append, file))
            else:  # it is not even compressed
                self._refuse(append, file, file.failure)
        if not due:
            return
        frames = self._compressor.frames([append.lines for append, _ in due])
        made = [(append, file, frame) for (append, file), frame in zip(due, frames, strict=True)]
        written = self._append_to_closed([(file, frame) for _, file, frame in made])
        for append, file, frame in made:
            if id(file) in written:
                self._written(append, file.size)
            else:
                self._append_frame(append, file, frame)

    def _append_to_closed(self, appends: list[tuple[SpoolFile, bytes]]) -> set[int]:
        """Where more files are written than may be open, those that find no handle: not worth one each."""
        free = self._order.handles_max - len(self._handles)
        closed = [item for item in appends if item[0].is_idle][free:]
        if len(closed) < 2 or self._labels_due:
            return set()
        return {id(file) for file, _ in closed[: append_to_each(closed)]}

    def _written(self, append: _Append, size: int) -> None:
        self._failures = 0
        self._inbox.put(FrameWritten(append.file_id, append.chunk, size))

    def _append_frame(self, append: _Append, file: SpoolFile, frame: bytes) -> None:
        file_id, chunk = append.file_id, append.chunk
        if file.failure is not None:
            # Since its frame was made: closed for another's sake.
            self._refuse(append, file, file.failure)
            return
        try:
            if self._labels_due:
                self._write_label(file_id)
            self._use_handle(file_id, file)
            size = file.append(frame)
        except (OSError, SpoolError) as error:
            self._append_failed(file_id, chunk, file, error)
            return
        self._written(append, size)

    def _refuse(self, append: _Append, file: SpoolFile, failure: OSError | SpoolError) -> None:
        detail = f"after an earlier failure: {failure}"
        failed = WriteFailed(append.file_id, append.chunk, file.size, is_no_space(failure), detail)
        self._inbox.put(failed)

    def _append_failed(self, file_id: int, chunk: int, file: SpoolFile, error: OSError | SpoolError) -> None:
        file.failure = error
        self._failures += 1
        if not file.is_open:
            self._handles.pop(file_id, None)
        detail = _words(error)
        self._inbox.put(WriteFailed(file_id, chunk, file.size, is_no_space(error), detail))
        self._emit(SpoolWriteFailed(detail, self._failures))

    def seal(self, file_id: int) -> None:
        file = self._files.get(file_id)
        if file is None:
            self._inbox.put(SealFailed(file_id, False, "there is no frame in it to seal"))
            return
        try:
            self._write_label(file_id)
            if file_id in self._labelled:
                sync_label(self._open_dir, self._nonce(file_id))
                fsync_directory(self._open_dir)
            if self._order.keep_labels or file.is_torn:
                self._use_handle(file_id, file)
            checksums = file.seal(self._order.directory.uploads_dir, fsync=self._order.keep_labels)
        except (OSError, SpoolError) as error:
            if not file.is_open:
                self._handles.pop(file_id, None)
            self._inbox.put(SealFailed(file_id, is_no_space(error), _words(error)))
            return
        self._forget(file_id)
        self._inbox.put(FileSealed(file_id, file.size, checksums, os.fspath(file.path), self._nonce(file_id)))

    def discard(self, file_id: int) -> None:
        file = self._files.get(file_id)
        self._labels_due.pop(file_id, None)
        # A file that cannot be deleted now is deleted at the next start.
        with contextlib.suppress(OSError):
            if file is not None:
                file.remove()
            else:  # a seal that was under way has come first
                name = f"{self._nonce(file_id)}.{self._order.codec.extension}"
                (self._order.directory.uploads_dir / name).unlink(missing_ok=True)
            if file_id in self._labelled:
                label_path(self._open_dir, self._nonce(file_id)).unlink(missing_ok=True)
        self._forget(file_id)

    def label(self, file_id: int, key: ObjectKey) -> None:
        if file_id not in self._files:
            self._new(file_id)
        self._labels_due[file_id] = Label(key, self._nonce(file_id), self._order.codec)
        # Where it cannot be written yet, the next append tries again and fails with it.
        with contextlib.suppress(OSError):
            self._write_label(file_id)

    # --- files and handles ------------------------------------------------------------------

    def _nonce(self, file_id: int) -> str:
        return f"{self._order.run_id}-{file_id}"

    def _new(self, file_id: int) -> SpoolFile:
        path = self._open_dir / f"{self._nonce(file_id)}.{self._order.codec.extension}"
        file = self._files[file_id] = SpoolFile(path, self._order.checksums)
        return file

    def _write_label(self, file_id: int) -> None:
        if (label := self._labels_due.get(file_id)) is not None:
            write_label(self._open_dir, label)
            del self._labels_due[file_id]
            self._labelled.add(file_id)

    def _use_handle(self, file_id: int, file: SpoolFile) -> None:
        """Open the file if it is closed, after closing the one that was not used for longest."""
        if file.is_open:
            self._handles.move_to_end(file_id)
            return
        while len(self._handles) >= self._order.handles_max:
            self._close_longest_unused()
        while True:
            try:
                file.open()
                break
            except OSError as error:
                # Connections and libraries have taken more than was left to them: do with fewer files.
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._handles:
                    raise
                self._close_longest_unused()
        self._handles[file_id] = file

    def _close_longest_unused(self) -> None:
        _, longest_unused = self._handles.popitem(last=False)
        longest_unused.close()

    def _forget(self, file_id: int) -> None:
        self._files.pop(file_id, None)
        self._handles.pop(file_id, None)
        self._labels_due.pop(file_id, None)
        self._labelled.discard(file_id)


def _words(error: OSError | SpoolError) -> str:
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return str(error)
