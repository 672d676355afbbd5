"""Alert rules and dashboard: every metric in them exists, every alert is tried, and each has its page."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from archiver.telemetry.metrics import Metrics
from archiver.telemetry.state import StatusHolder
from tests.unit.telemetry_samples import a_status

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "dfe-archiver.rules.yaml"
RULES_TEST = ROOT / "deploy" / "prometheus" / "dfe-archiver.rules.test.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dfe-archiver.dashboard.json"
OPERATIONS = ROOT / "docs" / "operations.md"
PROMETHEUS_OWN = {"up"}


def _alerts() -> list[dict[str, Any]]:
    rules = yaml.safe_load(RULES.read_text())
    return [rule for group in rules["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Every sample that `/metrics` shows, with the names of its labels."""
    source = StatusHolder()
    source.publish(a_status())
    text = generate_latest(Metrics(source, version="0").registry).decode()
    labels: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
        # one without a sample yet, since its labels come from outside
        labels[family.name if family.type != "counter" else f"{family.name}_total"] |= set()
    return labels


def _dashboard_expressions() -> Iterator[str]:
    def panels(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for item in items:
            yield item
            yield from panels(item.get("panels", []))

    dashboard = json.loads(DASHBOARD.read_text())
    for panel in panels(dashboard["panels"]):
        yield from (target["expr"] for target in panel.get("targets", []))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def _metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:dfe_archiver|process)_[a-z0-9_]+\b|\bup\b", expression))


def test_every_metric_in_rules_and_dashboard_is_on_the_endpoint(exposed: dict[str, set[str]]) -> None:
    """[O3]"""
    expressions = [alert["expr"] for alert in _alerts()] + list(_dashboard_expressions())
    named = set().union(*map(_metrics_in, expressions))
    assert len(named) > 25
    assert named - PROMETHEUS_OWN <= set(exposed)


def test_every_label_value_that_an_alert_asks_for_is_one_that_a_metric_takes() -> None:
    """An alert on `outcome="fail"` would never fire."""
    source = StatusHolder()
    source.publish(a_status())
    text = generate_latest(Metrics(source, version="0").registry).decode()
    asked = re.findall(r'(dfe_archiver_\w+)\{(\w+)=~?"([^"]+)"', "\n".join(a["expr"] for a in _alerts()))
    assert asked
    for metric, label, values in asked:
        for value in values.split("|"):
            assert re.search(rf'^{metric}\{{[^}}]*{label}="{value}"', text, re.M), (metric, label, value)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for test in yaml.safe_load(RULES_TEST.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            (fires if case["exp_alerts"] else silent).add(case["alertname"])
    names = {alert["alert"] for alert in _alerts()}
    assert fires == silent == names


def test_every_alert_says_what_it_is_and_where_to_read_on() -> None:
    """`docs/operations.md` has a heading for each."""
    headings = set(re.findall(r"^#+ (\w+)$", OPERATIONS.read_text(), re.M))
    for alert in _alerts():
        name = alert["alert"]
        assert alert["annotations"].keys() == {"summary", "description", "runbook"}, name
        assert alert["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert alert["labels"]["severity"] in ("critical", "warning"), name
        assert name in headings


def _first_column(page: Path, heading: str) -> list[str]:
    section = page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (`[^|]+`) \|", section, re.M)


SOURCE = "".join(path.read_text() for path in sorted((ROOT / "archiver").rglob("*.py")))


def test_every_reason_for_not_being_ready_is_one_that_the_archiver_gives() -> None:
    """[O2]: the page's words are the program's, up to what is filled in."""
    reasons = _first_column(OPERATIONS, "Why it is not ready")
    assert len(reasons) >= 16
    for reason in reasons:
        for part in reason.strip("`").split("…"):
            assert part.strip(" s:") in SOURCE, reason


def test_every_reason_for_a_pause_and_every_reason_of_kafka_is_on_the_page() -> None:
    """[O2]: the other way round."""
    page = OPERATIONS.read_text()
    pauses = re.search(r"_PAUSE_WORDS = \{(.*?)\n\}", SOURCE, re.S)
    assert pauses is not None
    for words in re.findall(r'": "([^"]+)"', pauses[1]):
        assert words.split(",")[0].removesuffix(" on the spool's disk") in page, words
    ready = re.search(r"None once the group has been joined.*?return None", SOURCE, re.S)
    assert ready is not None
    for words in re.findall(r'return f?"([^"{]+)', ready[0]):
        assert words.strip() in page, words


def test_every_kind_of_failed_upload_on_the_page_is_one_that_is_counted() -> None:
    rows = _first_column(ROOT / "docs" / "troubleshooting.md", "The store")
    kinds = [kind for row in rows for kind in re.findall(r"`(\w+)`", row)]
    assert len(kinds) > 8
    for kind in kinds:
        assert f'"{kind}"' in SOURCE, kind


@pytest.mark.servers
def test_prometheus_takes_the_rules_and_they_fire_when_they_should() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", str(RULES_TEST)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", str(RULES)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
