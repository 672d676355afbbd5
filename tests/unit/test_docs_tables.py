"""The documentation names tests: each must exist, and every case from the field must have one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
RELIABILITY = ROOT / "docs" / "reliability.md"
CASES = [f"c{n:02}" for n in range(1, 45)]


def known() -> set[str]:
    """Names of all test functions and test modules."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        names.add(path.stem)
        names.update(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    return names


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"\btest_\w+", page.read_text()))
    assert not named - known(), f"{page.name} names tests that do not exist"


def test_every_planted_bug_that_the_internals_name_exists() -> None:
    named = set(re.findall(r"`sim: (\w+)`", (ROOT / "docs" / "internals.md").read_text())) - {"name"}
    planted = set(re.findall(r"^def (\w+)", (ROOT / "tests" / "sim" / "plants.py").read_text(), re.MULTILINE))
    assert named and not named - planted


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_that_a_page_links_to_exists(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]*))?\)", page.read_text()):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"


def test_every_case_has_a_row_with_a_test() -> None:
    rows = re.findall(r"^\| (c\d\d) \|.*\| ([^|]*) \|$", RELIABILITY.read_text(), re.MULTILINE)
    assert [case for case, _ in rows] == CASES
    assert all("`test_" in tests for _, tests in rows)


def test_a_test_that_bears_a_cases_number_stands_in_its_row() -> None:
    """What has been written for a case can be found from the table."""
    for case, tests in re.findall(r"^\| (c\d\d) \|.*\| ([^|]*) \|$", RELIABILITY.read_text(), re.MULTILINE):
        named = set(re.findall(r"test_c\d\d_\w+", tests))
        assert all(name.startswith(f"test_{case}_") for name in named), case
