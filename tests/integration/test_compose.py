"""What `deploy/compose` says, run without an engine: its broker's properties, its store's command, its
archiver's configuration, its Prometheus with the rules, and every query of its dashboard."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.harness.archive import compare, read_objects
from tests.harness.compose import FOLDER, ROOT, broker_properties, resolved
from tests.harness.daemon import Daemon, wait_until
from tests.harness.dashboard import expressions, panels, picture
from tests.harness.kafka import KafkaServer
from tests.harness.process import Server, free_port
from tests.harness.prometheus import Prometheus
from tests.harness.seaweed import _binary

RECORDS = 3_000
ORGS = 5
QUIET_PANELS = {"What is failing?", "Failed attempts", "Default segment"}
"""Those that show nothing while nothing is wrong."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return resolved()


@pytest.fixture(scope="module")
def broker(
    compose: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, log_dir: Path
) -> Iterator[KafkaServer]:
    root = tmp_path_factory.mktemp("compose-kafka")
    with KafkaServer(
        root, log_dir, name="compose-kafka", properties=broker_properties(compose), short_lived=True
    ) as server:
        yield server


@pytest.fixture(scope="module")
def s3(compose: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[Any]:
    """A client of the store that the Compose file's command starts, on another port and folder."""
    root = tmp_path_factory.mktemp("compose-s3")
    identities = root / "identities.json"
    identities.write_text(compose["configs"]["identities"]["content"])
    port = free_port()
    placed = {"-dir": root, "-s3.port": port, "-s3.config": identities}
    command = [
        f"{name}={placed[name]}" if (name := argument.partition("=")[0]) in placed else argument
        for argument in compose["services"]["s3"]["command"]
    ]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port.grpc={free_port()}"]
    for part in ("master", "filer", "volume", "admin"):
        command += [f"-{part}.port={free_port()}", f"-{part}.port.grpc={free_port()}"]
    environment = compose["services"]["archiver"]["environment"]
    client = boto3.session.Session(
        environment["S3_ACCESS_KEY_ID"], environment["S3_SECRET_ACCESS_KEY"], region_name="us-east-1"
    ).client("s3", endpoint_url=f"http://127.0.0.1:{port}", config=Config(s3={"addressing_style": "path"}))

    def bucket_made() -> bool:
        try:
            client.head_bucket(Bucket="archive")
        except (ClientError, BotoCoreError):
            return False
        return True

    with Server("compose-s3", [_binary(), *command], log_dir, ready=bucket_made, ready_timeout_secs=60):
        yield client


@pytest.fixture(scope="module")
def daemon(
    compose: dict[str, Any],
    broker: KafkaServer,
    s3: Any,
    tmp_path_factory: pytest.TempPathFactory,
    log_dir: Path,
) -> Iterator[Daemon]:
    """The archiver with the Compose file's configuration and variables, its servers' addresses replaced."""
    settings = yaml.safe_load((FOLDER / "archiver.yaml").read_text())
    settings["kafka"]["brokers"] = [broker.bootstrap]
    settings["s3"]["endpoint"] = s3.meta.endpoint_url
    # the same, but sooner
    settings["archive"]["roll_interval_secs"] = 2
    settings["buffer"]["flush_age_secs"] = 1
    environment = {
        name: value
        for name, value in compose["services"]["archiver"]["environment"].items()
        if name != "DFE_ARCHIVER_CONFIG"
    }
    # without a topic there is nothing to be ready for
    broker.create_topic("events", 4)
    with Daemon(
        tmp_path_factory.mktemp("compose"), log_dir, settings, name="compose-archiver", env=environment
    ) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def prometheus(
    daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, log_dir: Path
) -> Iterator[Prometheus]:
    """With the Compose file's job and the rules."""
    with Prometheus(
        tmp_path_factory.mktemp("prometheus"),
        log_dir,
        yaml.safe_load((FOLDER / "prometheus.yml").read_text()),
        rules=ROOT / "deploy" / "prometheus" / "dfe-archiver.rules.yaml",
        targets=[f"127.0.0.1:{daemon.port}"],
    ) as server:
        yield server


def test_what_is_produced_is_in_its_bucket(daemon: Daemon, broker: KafkaServer, s3: Any) -> None:
    """Every topic, with the credentials, bucket and prefix of the Compose file."""
    expected: dict[str, list[bytes | None]] = {}
    values = []
    for n in range(RECORDS):
        org = f"org-{n % ORGS}"
        values.append(f'{{"_org_id":"{org}","n":{n}}}'.encode())
        expected.setdefault(f"events/{org}", []).append(values[-1])
    broker.produce("events", values)
    wait_until(lambda: daemon.metrics().total("records_archived_total") == RECORDS, 60, "all archived")
    listed = s3.list_objects_v2(Bucket="archive", Prefix="kafka/")["Contents"]
    objects = {
        item["Key"].removeprefix("kafka/"): s3.get_object(Bucket="archive", Key=item["Key"])["Body"].read()
        for item in listed
    }
    assert compare(expected, read_objects(objects)).exact


def test_prometheus_scrapes_it_and_evaluates_every_rule(prometheus: Prometheus) -> None:
    wait_until(lambda: [s["value"][1] for s in prometheus.query("up")] == ["1"], 30, "a scrape")
    wait_until(lambda: set(prometheus.rules().values()) == {"ok"}, 30, f"rules: {prometheus.rules()}")
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "dfe-archiver.rules.yaml").read_text())
    assert set(prometheus.rules()) == {rule["alert"] for rule in rules["groups"][0]["rules"]}
    # one that is only pending goes by itself: a busy machine may look ill for a moment
    wait_until(lambda: prometheus.query("ALERTS") == [], 30, f"no alert: {prometheus.query('ALERTS')}")
    named = set(re.findall(r"\bdfe_archiver_\w+", json.dumps(rules)))
    assert len(named) > 20
    assert [name for name in sorted(named) if not prometheus.query(name)] == []


def test_every_panel_of_the_dashboard_shows_something(
    prometheus: Prometheus, daemon: Daemon, broker: KafkaServer, tmp_path: Path
) -> None:
    """Rates need two scrapes with something in between."""
    start = time.time()
    wait_until(lambda: prometheus.query("dfe_archiver_build_info"), 30, "a scrape")
    broker.produce("events", [b'{"_org_id":"late"}'] * 500)
    silent: set[str] = set()

    def all_shown() -> bool:
        silent.clear()
        for panel in panels():
            found = [series for expression in expressions(panel) for series in prometheus.query(expression)]
            if not found and panel["title"] not in QUIET_PANELS:
                silent.add(panel["title"])
        return not silent

    try:
        wait_until(all_shown, 30)
    except TimeoutError:
        pytest.fail(f"panels without data: {silent}")
    page = picture(prometheus, start, time.time())
    assert page.count("<svg") == sum(panel["type"] == "timeseries" for panel in panels())
    if kept := os.environ.get("KEEP_DASHBOARD"):
        Path(kept).write_text(page)


def test_the_first_row_answers_in_words(prometheus: Prometheus) -> None:
    """While all is well: something arrives, it is safe, nothing fails."""
    first = {panel["title"]: panel for panel in panels() if panel["gridPos"]["y"] == 0}
    (safe,) = (prometheus.query(expressions(first["Is it safe?"])[0])[0],)
    mapping = first["Is it safe?"]["fieldConfig"]["defaults"]["mappings"][0]["options"]
    assert mapping[safe["value"][1]]["text"] == "Yes"
    failing = [s for e in expressions(first["What is failing?"]) for s in prometheus.query(e)]
    assert failing == [], json.dumps(failing)
