"""What a file in the spool needs to be uploaded by a later process: its key, nonce and codec [D7].

A label lies at `open/<nonce>.key` for as long as its file is in the spool, wherever the file moves,
so that no crash between two moves can part them. Only files whose records nobody will send again
have one: a file without a label is read again from Kafka.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from archiver.codecs import CODECS, Codec
from archiver.domain.sealed import ObjectKey
from archiver.spool.file import FILE_MODE

SUFFIX = ".key"


@dataclass(frozen=True, slots=True)
class Label:
    """The key of a file in the spool; `nonce` is also the file's name up to the first dot."""

    key: ObjectKey
    nonce: str
    codec: Codec


def label_path(open_dir: Path, nonce: str) -> Path:
    return open_dir / (nonce + SUFFIX)


def write_label(open_dir: Path, label: Label) -> None:
    """Write or replace a label, whole or not at all. Raises OSError."""
    text = json.dumps(
        {
            "stem": label.key.stem,
            "writer_id": label.key.writer_id,
            "extension": label.key.extension,
            "nonce": label.nonce,
            "codec": label.codec.name,
        }
    )
    path = label_path(open_dir, label.nonce)
    unfinished = path.with_suffix(".tmp")
    try:
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def sync_label(open_dir: Path, nonce: str) -> None:
    """Make a label survive a power cut, its name aside. Raises OSError."""
    fd = os.open(label_path(open_dir, nonce), os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_label(open_dir: Path, nonce: str) -> Label | None:
    """The label, or None where there is none. Raises ValueError where it makes no sense, OSError."""
    try:
        text = label_path(open_dir, nonce).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        parts = json.loads(text)
        key = ObjectKey(str(parts["stem"]), str(parts["writer_id"]), str(parts["extension"]))
        return Label(key, str(parts["nonce"]), CODECS[parts["codec"]])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{label_path(open_dir, nonce)}: not a label: {error!r}") from error
