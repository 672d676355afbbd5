"""Every link of the documentation leads somewhere: to a file that is there, to a heading that is in it."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "README.md"


def _pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


PAGES = _pages()


def _prose(text: str) -> str:
    """Without code, where brackets mean other things."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


@cache
def _anchors(page: Path) -> set[str]:
    """As the usual renderers make them: lower case, spaces to dashes, punctuation left out."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#{1,6} +(.+?) *#*$", text, re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def _links(page: Path) -> list[str]:
    text = page.read_text()
    # the text of a link may itself be code
    unfenced = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    return re.findall(r"\]\(([^)\s]+)\)", unfenced)


def _leads(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or target.suffix != ".md" or anchor in _anchors(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    wrong = [link for link in _links(page) if not re.match(r"[a-z]+:", link) and not _leads(page, link)]
    assert not wrong


def test_the_index_has_every_page() -> None:
    linked = {(INDEX.parent / link.partition("#")[0]).resolve() for link in _links(INDEX)}
    docs = [page for page in PAGES if page.is_relative_to(INDEX.parent) and page != INDEX]
    # decisions are reached through their folder
    missing = {page.name for page in docs if "decisions" not in page.parts and page not in linked}
    assert not missing
    assert INDEX.parent / "decisions" in linked


def test_no_page_holds_a_reference_that_is_not_resolved() -> None:
    for page in PAGES:
        assert not re.search(r"\]\[[^]\s]+\]", _prose(page.read_text())), page.name
