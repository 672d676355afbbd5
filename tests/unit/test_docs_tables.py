"""The documentation names tests: each must exist, and every case from the field must have one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from archiver.settings.load import load

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


EXAMPLES = [
    (page, block)
    for page in DOCS
    if page.name not in ("deployment.md", "configuration.md")  # those have tests of their own
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("page", "block"), EXAMPLES, ids=[page.name for page, _ in EXAMPLES])
def test_every_example_of_a_page_is_a_configuration(page: Path, block: str, tmp_path: Path) -> None:
    """[C4]: with a destination and a topic where the page speaks of something else."""
    (tmp_path / "file").write_text('{"type": "service_account"}')
    settings = yaml.safe_load(re.sub(r"/etc/[\w./-]+", str(tmp_path / "file"), block))
    settings.setdefault("archive", {}).setdefault("destination", "file:///archive")
    if settings.get("transport") != "grpc":
        settings.setdefault("kafka", {}).setdefault("topics", ["events"])
    (tmp_path / "archiver.yaml").write_text(yaml.safe_dump(settings))
    values = dict.fromkeys(re.findall(r"\$\{(\w+)\}", block), "value")
    load(tmp_path / "archiver.yaml", values)


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
