"""The Compose file: Docker Compose takes it, what it mounts is there, and the archiver knows its keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from archiver.settings.keys import CONFIG_ENV, env_names
from archiver.settings.load import load
from tests.harness.compose import FOLDER, ROOT, resolved


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return resolved()


def test_every_file_that_is_mounted_is_there(compose: dict[str, Any]) -> None:
    mounts = [
        Path(volume["source"])
        for service in compose["services"].values()
        for volume in service.get("volumes", ())
        if volume["type"] == "bind"
    ]
    assert len(mounts) == 6
    for path in mounts:
        assert path.exists() and path.is_relative_to(ROOT), path


def test_the_archiver_knows_every_variable_and_key(compose: dict[str, Any]) -> None:
    """[C4]"""
    environment = compose["services"]["archiver"]["environment"]
    assert set(environment) <= {*env_names(), CONFIG_ENV}
    assert environment.pop(CONFIG_ENV) == "/etc/dfe-archiver/archiver.yaml"
    settings = load(FOLDER / "archiver.yaml", environment).settings
    assert settings.kafka.brokers == ("kafka:9092",)
    assert settings.s3.endpoint == "http://s3:8333"
    assert f"-bucket={settings.destination.bucket}" in compose["services"]["s3"]["command"]


def test_the_archiver_has_time_to_stop(compose: dict[str, Any]) -> None:
    """[D6]"""
    settings = load(FOLDER / "archiver.yaml", {}).settings
    grace = compose["services"]["archiver"]["stop_grace_period"]
    assert grace == "50s"
    assert settings.shutdown_timeout_secs + settings.kafka.drain_timeout_secs < 50


def test_the_archiver_may_do_no_more_than_it_must(compose: dict[str, Any]) -> None:
    archiver = compose["services"]["archiver"]
    assert archiver["read_only"] is True
    assert archiver["cap_drop"] == ["ALL"]
    assert archiver["security_opt"] == ["no-new-privileges:true"]
    writable = [volume["target"] for volume in archiver["volumes"] if not volume.get("read_only")]
    assert writable == ["/var/spool/dfe-archiver"]


def test_every_port_is_open_on_this_machine_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert len(ports) == 5
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}


def test_credentials_of_ones_own_reach_the_archiver_and_the_store() -> None:
    compose = resolved({"S3_ACCESS_KEY_ID": "mine", "S3_SECRET_ACCESS_KEY": "my own"})
    assert compose["services"]["archiver"]["environment"]["S3_SECRET_ACCESS_KEY"] == "my own"
    identities = json.loads(compose["configs"]["identities"]["content"])
    assert identities["identities"][0]["credentials"] == [{"accessKey": "mine", "secretKey": "my own"}]


def test_the_dashboard_finds_its_source_and_grafana_its_files(compose: dict[str, Any]) -> None:
    grafana = compose["services"]["grafana"]
    targets = {volume["target"]: Path(volume["source"]) for volume in grafana["volumes"]}
    provider = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"][0]
    folder = targets[provider["options"]["path"]]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    dashboard = json.loads((folder / home.name).read_text())
    assert str(home.parent) == provider["options"]["path"]
    source = yaml.safe_load((FOLDER / "grafana" / "datasources.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert dashboard["templating"]["list"][0] == {
        "name": "datasource",
        "label": "Source",
        "type": "datasource",
        "query": source["type"],
        "hide": 0,
        "current": {},
    }


def test_panels_do_not_overlap_and_the_first_row_holds_the_five_questions() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dfe-archiver.dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    first = [panel["title"] for panel in dashboard["panels"] if panel["gridPos"]["y"] == 0]
    assert first == [
        "Is data arriving?",
        "How far behind?",
        "Is it safe?",
        "What is failing?",
        "How full?",
    ]
