"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.contract.store_case import Servers


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Real servers behind the stores, started on demand and stopped at the session's end."""
    with ExitStack() as stack:
        yield Servers(stack)
