"""The local directory in which archive files grow until they are sealed."""

from archiver.spool.directory import Leftovers, SpoolDirectory
from archiver.spool.file import SpoolFile
from archiver.spool.writers import SpoolWriters, open_files_max

__all__ = ["Leftovers", "SpoolDirectory", "SpoolFile", "SpoolWriters", "open_files_max"]
