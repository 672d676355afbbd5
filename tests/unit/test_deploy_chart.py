"""The Helm chart: what each profile renders, that Kubernetes takes it, that the archiver knows its keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from helm_python import Chart
from helm_python.chart import lint
from helm_python.errors import HelmError

from archiver import __version__
from archiver.settings.keys import CONFIG_ENV, env_names
from archiver.settings.load import load
from archiver.settings.models import Settings
from tests.harness.chart import (
    CHART,
    COPIES,
    GOLDEN,
    PROFILES,
    ROOT,
    SCHEMA,
    golden,
    rendered,
    schema_text,
)
from tests.harness.daemon import merged

KUBERNETES = ("1.27", "1.34")
FOREIGN_KINDS = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
"""Of operators: Kubernetes' own schema does not know them."""

MINIMAL: Mapping[str, Any] = {
    "config": {"archive": {"destination": "s3://b/p"}, "kafka": {"topics": ["events"]}}
}


def _one(manifests: list[dict[str, Any]], *kinds: str) -> dict[str, Any]:
    found = [manifest for manifest in manifests if manifest["kind"] in kinds]
    assert len(found) == 1, kinds
    return found[0]


def _container(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    workload = _one(manifests, "Deployment", "StatefulSet")
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


def _env(manifests: list[dict[str, Any]]) -> dict[str, str]:
    return {item["name"]: item.get("value", "from a secret") for item in _container(manifests)["env"]}


def _settings(manifests: list[dict[str, Any]], tmp_path: Path) -> Settings:
    """What the archiver makes of the pod's file and variables, the secrets missing."""
    path = tmp_path / "archiver.yaml"
    config = next(m for m in manifests if m["kind"] == "ConfigMap" and "archiver.yaml" in m["data"])
    path.write_text(config["data"]["archiver.yaml"])
    env = {name: value for name, value in _env(manifests).items() if value != "from a secret"}
    return load(path, env).settings


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_renders_as_its_golden_file_shows(profile: str) -> None:
    """Otherwise run `python -m tests.harness.chart` and look at what changed."""
    assert (GOLDEN / f"chart-{profile}.yaml").read_text() == golden(profile)


def test_every_profile_has_a_golden_file() -> None:
    assert {path.stem for path in (CHART / "profiles").glob("*.yaml")} == set(PROFILES)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("profile", PROFILES)
def test_kubernetes_takes_what_each_profile_renders(profile: str, version: str) -> None:
    for manifest in rendered(profile, PROFILES[profile]):
        if manifest["kind"] not in FOREIGN_KINDS:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("profile", PROFILES)
def test_helm_finds_nothing_to_complain_about(profile: str) -> None:
    values = yaml.safe_load((CHART / "profiles" / f"{profile}.yaml").read_text())
    report = lint(CHART, merged(values, PROFILES[profile]), strict=True)
    # "icon is recommended" is information
    assert not [message for message in report["messages"] if message["severity"] >= 2], report
    assert not report["errors"]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_key_and_variable_that_the_chart_sets_is_the_archivers_own(
    profile: str, tmp_path: Path
) -> None:
    """[C2], [C4], [C5]: names exist, values pass, rules over several keys hold."""
    manifests = rendered(profile, PROFILES[profile])
    assert set(_env(manifests)) <= {*env_names(), CONFIG_ENV}
    settings = _settings(manifests, tmp_path)
    assert str(settings.buffer.spool_dir) == "/var/spool/dfe-archiver"
    assert settings.metrics.listen == "0.0.0.0:9090"


def test_the_variables_in_the_templates_are_all_known() -> None:
    """Those behind a condition, too, such as Kafka's login."""
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    named = set(re.findall(r"\b(?:DFE_ARCHIVER|KAFKA|S3|METRICS|LOG|DLQ)_[A-Z0-9_]+\b", text))
    assert {"S3_ENDPOINT", "KAFKA_SASL_PASSWORD", "DFE_ARCHIVER_DESTINATION"} <= named
    assert named <= {*env_names(), CONFIG_ENV}


def test_the_destination_of_the_file_stands_unless_there_is_a_local_path(tmp_path: Path) -> None:
    """[C1]: an empty variable is unset."""
    manifests = rendered("single", PROFILES["single"])
    assert _env(manifests)["DFE_ARCHIVER_DESTINATION"] == ""
    assert _settings(manifests, tmp_path).archive.destination == "s3://company-archive/kafka"

    both = merged(PROFILES["single"], {"archive": {"localPath": "/archive"}})
    manifests = rendered("single", both)
    assert _env(manifests)["DFE_ARCHIVER_DESTINATION"] == "file:///archive"
    assert _settings(manifests, tmp_path).archive.destination == "file:///archive"


def test_endpoint_and_bucket_come_from_the_values(tmp_path: Path) -> None:
    manifests = rendered("mesh", PROFILES["mesh"])
    settings = _settings(manifests, tmp_path)
    assert (settings.s3.endpoint, settings.destination.bucket, settings.destination.prefix) == (
        "http://s3.storage.svc:8333",
        "company-archive",
        "pushed",
    )
    assert settings.transport == "grpc"


def test_credentials_come_from_a_secret_that_may_be_missing() -> None:
    """[S7]: without it the SDK's own chain is asked."""
    env = {item["name"]: item for item in _container(rendered(None, MINIMAL))["env"]}
    for name in ("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"):
        assert env[name]["valueFrom"]["secretKeyRef"] == {
            "name": "dfe-archiver-s3",
            "key": name,
            "optional": True,
        }
    values = merged(MINIMAL, {"s3": {"secretName": ""}, "kafka": {"secretName": "login"}})
    names = set(_env(rendered(None, values)))
    assert "S3_ACCESS_KEY_ID" not in names
    assert {"KAFKA_SASL_USER", "KAFKA_SASL_PASSWORD"} <= names


@pytest.mark.parametrize("profile", PROFILES)
def test_a_pod_has_time_for_a_drain_and_the_stop_behind_it(profile: str, tmp_path: Path) -> None:
    """[D5], [D6]"""
    manifests = rendered(profile, PROFILES[profile])
    settings = _settings(manifests, tmp_path)
    pod = _one(manifests, "Deployment", "StatefulSet")["spec"]["template"]["spec"]
    needed = settings.shutdown_timeout_secs + settings.kafka.drain_timeout_secs
    assert needed < pod["terminationGracePeriodSeconds"] <= needed + 15


def test_part_seconds_are_rounded_up() -> None:
    values = merged(
        MINIMAL, {"config": {"shutdown_timeout_secs": 7.5, "kafka": {"drain_timeout_secs": 30.2}}}
    )
    pod = _one(rendered(None, values), "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 8 + 31 + 10


@pytest.mark.parametrize("profile", PROFILES)
def test_the_spool_of_each_profile_fits_on_its_volume(profile: str, tmp_path: Path) -> None:
    """[B2]: the bound is reached before the volume is full, and before a pod is evicted."""
    manifests = rendered(profile, PROFILES[profile])
    settings = _settings(manifests, tmp_path)
    spec = _one(manifests, "Deployment", "StatefulSet")["spec"]
    if "volumeClaimTemplates" in spec:
        size = spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    else:
        volumes = {volume["name"]: volume for volume in spec["template"]["spec"]["volumes"]}
        size = volumes["spool"]["emptyDir"]["sizeLimit"]
    volume_bytes = int(size.removesuffix("Gi")) << 30
    buffer = settings.buffer
    assert buffer.max_spool_bytes + buffer.min_free_disk_bytes < volume_bytes


@pytest.mark.parametrize("profile", PROFILES)
def test_the_memory_limit_leaves_room_above_the_memory_bound(profile: str, tmp_path: Path) -> None:
    """[B1]: the bound is of records; interpreter, SDKs and uploads come on top."""
    manifests = rendered(profile, PROFILES[profile])
    limit = _container(manifests)["resources"]["limits"]["memory"]
    units = {"Mi": 1 << 20, "Gi": 1 << 30}
    settings = _settings(manifests, tmp_path)
    assert int(limit[:-2]) * units[limit[-2:]] >= settings.buffer.max_bytes + (256 << 20)


@pytest.mark.parametrize("profile", PROFILES)
def test_pods_keep_to_the_restricted_standard(profile: str) -> None:
    manifests = rendered(profile, PROFILES[profile])
    pod = _one(manifests, "Deployment", "StatefulSet")["spec"]["template"]["spec"]
    container = _container(manifests)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert all("hostPath" not in volume for volume in pod["volumes"])


def test_replicas_are_left_to_whoever_scales() -> None:
    for kind, made in (("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        manifests = rendered("scale", merged(PROFILES["scale"], {"autoscaling": {"kind": kind}}))
        assert "replicas" not in _one(manifests, "Deployment")["spec"]
        scaler = _one(manifests, made)
        assert scaler["spec"]["scaleTargetRef"]["name"] == "archive-dfe-archiver"
    triggers = scaler["spec"]["triggers"]
    assert [trigger["metadata"]["topic"] for trigger in triggers] == ["events", "audit"]
    assert triggers[0]["metadata"]["lagThreshold"] == "1000000"
    assert triggers[0]["metadata"]["bootstrapServers"] == "kafka-0:9092,kafka-1:9092"


def test_keda_logs_in_where_kafka_wants_a_login() -> None:
    """It asks for the lag itself, with what a TriggerAuthentication says; without one it would be refused."""
    login = {"kind": "keda", "authenticationRef": {"name": "kafka"}}
    secure = {"config": {"kafka": {"security_protocol": "SASL_SSL"}}, "autoscaling": login}
    triggers = _one(rendered("scale", merged(PROFILES["scale"], secure)), "ScaledObject")["spec"]["triggers"]
    assert [trigger["authenticationRef"] for trigger in triggers] == [{"name": "kafka"}] * 2
    plain = merged(PROFILES["scale"], {"autoscaling": {"kind": "keda"}})
    assert "authenticationRef" not in str(_one(rendered("scale", plain), "ScaledObject"))


@pytest.mark.parametrize("profile", ["scale", "mesh"])
def test_a_prometheus_in_another_namespace_may_scrape(profile: str) -> None:
    """Where most of them are: the profile that has it scrape must not shut it out, nor let pushes in."""
    policy = _one(rendered(profile, PROFILES[profile]), "NetworkPolicy")["spec"]
    allowed = {rule["ports"][0]["port"]: rule["from"] for rule in policy["ingress"]}
    assert allowed.pop("metrics") == [{"namespaceSelector": {}}]
    assert allowed == ({"grpc": [{"podSelector": {}}]} if profile == "mesh" else {})


@pytest.mark.parametrize("profile", sorted(set(PROFILES) - {"mesh"}))
def test_the_values_that_the_page_shows_are_enough_for_each_profile_on_kafka(
    profile: str, tmp_path: Path
) -> None:
    """docs/deployment.md, word for word: what it calls mine.yaml."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    (mine,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "# mine.yaml" in block]
    manifests = rendered(profile, yaml.safe_load(mine))
    assert _settings(manifests, tmp_path).archive.destination == "s3://company-archive/kafka"


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_the_page_says_what_a_cluster_must_have_for_each_profile(profile: str) -> None:
    """A kind that plain Kubernetes does not know ends an installation with words that help nobody."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{profile}` |")]
    kinds = {manifest["kind"] for manifest in rendered(profile, PROFILES[profile])}
    needs = row.rsplit("|", 2)[1]
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert (kind in kinds) == (kind in needs), kind
    assert ("HorizontalPodAutoscaler" in kinds) == ("metrics server" in needs)


def test_lists_may_be_written_with_commas_and_words_in_any_case() -> None:
    """As the archiver itself reads them."""
    values = {
        "config": {
            "archive": {"destination": "s3://b/p"},
            "kafka": {"topics": "events, audit", "brokers": "a:9092,b:9092"},
        },
        "autoscaling": {"kind": "keda"},
    }
    triggers = _one(rendered(None, values), "ScaledObject")["spec"]["triggers"]
    assert [trigger["metadata"]["topic"] for trigger in triggers] == ["events", "audit"]
    assert triggers[0]["metadata"]["bootstrapServers"] == "a:9092,b:9092"
    service = _one(rendered(None, merged(MINIMAL, {"config": {"transport": "GRPC"}})), "Service")
    assert [port["name"] for port in service["spec"]["ports"]] == ["metrics", "grpc"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"config": {"archive": {"destination": "s3://b/p"}, "compresion": {}}}, "compresion"),
        ({"config": {"archive": {"roll_interval_sec": 3}}}, "roll_interval_sec"),
        ({"replica": 3}, "replica"),
        ({"s3": {"bukcet": "b"}}, "bukcet"),
        ({"config": {"kafka": {"topics": ["a"]}}}, "where should files go"),
        ({"archive": {"localPath": "archive"}}, "localPath"),
        (merged(MINIMAL, {"config": {"shutdown_timeout_secs": "${STOP:-20}"}}), "write numbers"),
        (merged(MINIMAL, {"autoscaling": {"kind": "lag"}}), "kind"),
        (
            {
                "config": {
                    "archive": {"destination": "s3://b/p"},
                    "kafka": {"topics": ["a"], "security_protocol": "sasl_ssl"},
                },
                "autoscaling": {"kind": "keda"},
            },
            "autoscaling.authenticationRef",
        ),
        (
            {
                "config": {
                    "archive": {"destination": "s3://b/p"},
                    "kafka": {"topics": [], "topic_include": [".*"]},
                },
                "autoscaling": {"kind": "keda"},
            },
            "config.kafka.topics",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(values: Mapping[str, Any], told: str) -> None:
    with pytest.raises(HelmError, match=told):
        rendered(None, values)


def test_schema_and_copies_are_as_what_they_are_made_of() -> None:
    """Otherwise run `python -m tests.harness.chart`."""
    assert SCHEMA.read_text() == schema_text()
    for copy, original in COPIES.items():
        assert copy.read_bytes() == original.read_bytes(), copy.name


def test_the_rules_in_the_chart_take_the_archive_delay_from_the_values() -> None:
    values = merged(MINIMAL, {"prometheusRule": {"enabled": True, "archiveDelaySeconds": 4_500_000}})
    rule = _one(rendered(None, values), "PrometheusRule")
    original = yaml.safe_load((CHART / "files" / "dfe-archiver.rules.yaml").read_text())
    delayed = {
        alert["alert"]: alert["expr"]
        for alert in rule["spec"]["groups"][0]["rules"]
        if alert not in original["groups"][0]["rules"]
    }
    assert delayed == {"DfeArchiverArchiveDelayed": "dfe_archiver_archive_delay_seconds > 4500000"}
    assert len(rule["spec"]["groups"][0]["rules"]) == len(original["groups"][0]["rules"])


def test_the_chart_installs_the_version_it_lies_beside() -> None:
    with Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == __version__
