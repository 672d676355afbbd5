"""For tests of the compiled part. That it has been built where there is a compiler is a test of its own."""

from __future__ import annotations

import pytest

from archiver.native import native

needs_native = pytest.mark.skipif(native is None, reason="there is no compiler here")
