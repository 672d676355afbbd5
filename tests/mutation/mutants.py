"""Small wrong changes to the source, one at a time: each must make a test fail, or say why none can."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Replace `old`, which is in `path` exactly once, by `new`. `equivalent` explains one that may live."""

    path: str
    old: str
    new: str
    what: str
    equivalent: str = ""


MUTANTS = (
    Mutant(
        "archiver/domain/ledger.py",
        "return min(self.holds.values(), default=self.position)",
        "return max(self.holds.values(), default=self.position)",
        "the mark is the highest hold",
    ),
    Mutant(
        "archiver/domain/ledger.py",
        "        elif first < held:\n            state.holds[file_id] = first\n",
        "",
        "a lower hold of the same file is not taken over",
    ),
    Mutant(
        "archiver/domain/ledger.py",
        "                state.holds.clear()\n",
        "                pass\n",
        "holds of a dropped assignment are kept",
        equivalent="a new assignment gets a new object, and nothing reads the old one's holds any more",
    ),
    Mutant(
        "archiver/domain/ledger.py",
        "and (state.position is None or position > state.position):",
        "and True:",
        "the position may go back",
    ),
    Mutant(
        "archiver/domain/ledger.py",
        "if mark is not None and (state.committed is None or mark > state.committed):",
        "if mark is not None:",
        "marks that are committed are offered again",
    ),
    Mutant(
        "archiver/drain.py",
        '            archiver.roll_all("shutdown" if partitions is None else "revoked", partitions)\n'
        "\n    def _undurable",
        "\n    def _undurable",
        "a drain does not seal again what moved to an heir",
    ),
    Mutant(
        "archiver/drain.py",
        "if p in partitions}",
        "if p}",
        "a revocation commits the marks of other partitions too",
        equivalent="they are as true as those of the revoked ones, and would be committed seconds later",
    ),
    Mutant(
        "archiver/drain.py",
        "        self._take_the_rest(asked_at + timeout / 2)\n",
        "",
        "a shutdown leaves in the queue what was answered",
    ),
    Mutant(
        "archiver/drain.py",
        "        archiver.advance_positions()\n        marks = parts.ledger.committable()",
        "        marks = parts.ledger.committable()",
        "the last commit does not pass gaps",
    ),
    Mutant(
        "archiver/pipeline.py",
        "            self.parts.ledger.advance(partition, batch.offsets[-1] + 1)\n",
        "            self.parts.ledger.advance(partition, batch.offsets[-1] + 2)\n",
        "the position is one too far",
    ),
    Mutant(
        "archiver/local_failures.py",
        "        heir.kept = heir.kept or file.kept\n",
        "",
        "an heir does not know that its records are nowhere else",
    ),
    Mutant(
        "archiver/pipeline.py",
        " and heir.file_id in self.files:\n            self.close_soon(heir, reason)",
        ":\n            self.close_soon(heir, reason)",
        "an heir that was abandoned is closed, and is not there",
    ),
    Mutant(
        "archiver/pipeline.py",
        "                file.held -= partitions\n                file.kept = True\n",
        "                file.held -= partitions\n",
        "records of a recreated topic may be deleted with others",
    ),
    Mutant(
        "archiver/local_failures.py",
        "        if not file.chunks:\n            heir.waits_for = None\n",
        "        heir.waits_for = None\n",
        "an heir is flushed before all of its predecessor's records are known",
    ),
    Mutant(
        "archiver/pipeline.py",
        "            if file.held or file.kept:\n",
        "            if file.held:\n",
        "records that nobody reads again are deleted at a revocation",
    ),
    Mutant(
        "archiver/local_failures.py",
        "        if file.failures >= LOCAL_FAILURES_MAX:\n",
        "        if file.failures < 0:\n",
        "a broken disk is tried for ever",
    ),
    Mutant(
        "archiver/pipeline.py",
        "        if result.size == 0:\n            self._forget(file)\n            return\n",
        "",
        "an empty sealed file is uploaded",
        equivalent="the writers answer a seal of an empty file with SealFailed; this is a second line",
    ),
    Mutant(
        "archiver/spool/file.py",
        "            self._torn = True\n            self._cut(fd)\n            raise\n",
        "            raise\n",
        "a torn frame stays in the file",
    ),
    Mutant(
        "archiver/spool/file.py",
        "        self._checksums.update(frame)\n        self.size += len(frame)\n",
        "        self.size += len(frame)\n",
        "the checksum misses the frames",
    ),
    Mutant(
        "archiver/spool/file.py",
        "            self._doubtful = True\n            raise\n\n    def remove",
        "            raise\n\n    def remove",
        "an fsync that succeeds after one that failed is believed",
    ),
    Mutant(
        "archiver/spool/writers.py",
        "        if file.failure is not None:\n",
        "        if False:\n",
        "a frame behind a failed one is written",
        equivalent="SpoolFile.append refuses too: two lines of defence for the order of records",
    ),
    Mutant(
        "archiver/spool/directory.py",
        "            file.truncate(whole.end)\n",
        "",
        "a leftover keeps its torn end",
    ),
    Mutant(
        "archiver/uploads.py",
        "            case KeyTakenError():\n                self._taken(waiting, now)\n",
        "            case KeyTakenError():\n                self._succeeded(waiting, now)\n",
        "a taken key counts as success",
    ),
    Mutant(
        "archiver/uploads.py",
        "        if not waiting.running:\n            del self._files[file_id]\n",
        "        if True:\n            del self._files[file_id]\n",
        "an abandoned file is deleted under its running attempt",
    ),
    Mutant(
        "archiver/uploads.py",
        "        if waiting.abandoned:\n            self._finish(waiting, None, keep=False)\n",
        "        if False:\n            self._finish(waiting, None, keep=False)\n",
        "an abandoned file that failed is tried for ever",
    ),
)
