"""The Helm chart as Helm renders it, its schema as the settings make it, and the files that show both.

`python -m tests.harness.chart` writes `values.schema.json`, the chart's copies of the rules and the
dashboard, and the rendered profiles under `tests/unit/golden`; the tests then hold the chart to them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from archiver.settings.keys import CLIENT, all_keys
from tests.harness.daemon import merged

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "dfe-archiver"
SCHEMA = CHART / "values.schema.json"
GOLDEN = ROOT / "tests" / "unit" / "golden"
COPIES = {
    CHART / "files" / "dfe-archiver.rules.yaml": ROOT / "deploy" / "prometheus" / "dfe-archiver.rules.yaml",
    CHART / "files" / "dfe-archiver.dashboard.json": ROOT
    / "deploy"
    / "grafana"
    / "dfe-archiver.dashboard.json",
}
PROFILES: Mapping[str, dict[str, Any]] = {
    "single": {
        "config": {
            "kafka": {"brokers": ["kafka:9092"], "topics": ["events"]},
            "archive": {"destination": "s3://company-archive/kafka"},
        }
    },
    "scale": {
        "config": {
            "kafka": {"brokers": ["kafka-0:9092", "kafka-1:9092"], "topics": ["events", "audit"]},
            "archive": {"destination": "s3://company-archive/kafka"},
        },
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/a"}},
    },
    "slim": {
        "config": {"kafka": {"brokers": ["kafka:9092"], "topics": ["events"]}},
        "archive": {
            "localPath": "/archive",
            "volume": {"persistentVolumeClaim": {"claimName": "archive"}},
        },
    },
    "mesh": {
        "config": {"archive": {"destination": "s3:///pushed"}},
        "s3": {"endpoint": "http://s3.storage.svc:8333", "bucket": "company-archive"},
    },
}
"""Each profile with the least that a user adds to it."""

_ANY_MAP: dict[str, Any] = {"type": "object"}
_TEXTS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
_LIST: dict[str, Any] = {"type": "array"}
_SHAPES: Mapping[str, dict[str, Any]] = {
    "podSecurityContext": _ANY_MAP,
    "securityContext": _ANY_MAP,
    "resources": _ANY_MAP,
    "nodeSelector": _TEXTS,
    "affinity": _ANY_MAP,
    "podAnnotations": _TEXTS,
    "podLabels": _TEXTS,
    "serviceAccount.annotations": _TEXTS,
    "serviceMonitor.labels": _TEXTS,
    "prometheusRule.labels": _TEXTS,
    "dashboard.labels": _TEXTS,
    "archive.volume": _ANY_MAP,
    "archive.localPath": {"type": "string", "pattern": "^(/.*)?$"},
    "probes.startup": _ANY_MAP,
    "probes.liveness": _ANY_MAP,
    "probes.readiness": _ANY_MAP,
    "replicas": {"type": "integer", "minimum": 0},
    "autoscaling.authenticationRef": _TEXTS,
    "autoscaling.kind": {"enum": ["", "hpa", "keda"]},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "podDisruptionBudget.maxUnavailable": {"type": ["integer", "string"]},
}
"""What the defaults alone do not tell."""


def rendered(profile: str | None, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The manifests of a release `archive` in namespace `data`, in the order of their files."""
    base = yaml.safe_load((CHART / "profiles" / f"{profile}.yaml").read_text()) if profile else {}
    with Chart.load(CHART) as chart:
        given = merged(base, values)
        chart.validate_schema(given)
        texts = chart.render(given, name="archive", namespace="data")
    manifests = [
        document
        for name, text in sorted(texts.items())
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
    ]
    return [manifest for manifest in manifests if manifest]


def golden(profile: str) -> str:
    """A profile rendered, as its golden file holds it: without long copies of files that are elsewhere."""
    manifests = rendered(profile, PROFILES[profile])
    for manifest in manifests:
        if manifest["kind"] == "PrometheusRule":
            manifest["spec"] = "as in deploy/prometheus"
        if "dfe-archiver.json" in manifest.get("data", {}):
            manifest["data"] = "as in deploy/grafana"
    return yaml.dump_all(manifests, Dumper=_Readable, sort_keys=False, width=110)


class _Readable(yaml.SafeDumper):
    """Texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)


def values_schema() -> dict[str, Any]:
    """Of every value of the chart; `config` has the names of the archiver's own settings and no others."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = _shape("", {name: value for name, value in defaults.items() if name != "config"})
    schema["properties"]["config"] = _config_schema()
    # Helm hands these to every chart
    schema["properties"]["global"] = _ANY_MAP
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _shape(name: str, value: Any) -> dict[str, Any]:
    if name in _SHAPES:
        return dict(_SHAPES[name])
    if isinstance(value, dict):
        parts = {key: _shape(f"{name}.{key}".lstrip("."), part) for key, part in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": parts}
    if isinstance(value, list):
        return dict(_LIST)
    kinds = {bool: "boolean", int: "integer", str: "string"}
    return {"type": kinds[type(value)]}


def _config_schema() -> dict[str, Any]:
    root: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    for path, key in all_keys().items():
        at = root
        for part in path[:-1]:
            fresh = {"type": "object", "additionalProperties": False, "properties": {}}
            at = at["properties"].setdefault(part, fresh)
        leaf: dict[str, Any] = {"description": key.why}
        at["properties"][path[-1]] = {**leaf, "type": "object"} if path == CLIENT else leaf
    return root


def schema_text() -> str:
    """The file."""
    return json.dumps(values_schema(), indent=2) + "\n"


def main() -> None:
    """Write everything that is made of something else."""
    for copy, original in COPIES.items():
        shutil.copyfile(original, copy)
    SCHEMA.write_text(schema_text())
    GOLDEN.mkdir(exist_ok=True)
    for profile in PROFILES:
        (GOLDEN / f"chart-{profile}.yaml").write_text(golden(profile))


if __name__ == "__main__":
    main()
