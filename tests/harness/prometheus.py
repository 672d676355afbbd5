"""A real Prometheus of a test, with a configuration of the repository pointed at the test's own servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import requests
import yaml

from tests.harness.process import Server, free_port


class Prometheus:
    """`config` is taken as it is, but for rule files (`rules`), targets (`targets`) and the intervals."""

    def __init__(
        self, root: Path, log_dir: Path, config: Mapping[str, Any], *, rules: Path, targets: list[str]
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        jobs = [{**job, "static_configs": [{"targets": targets}]} for job in config["scrape_configs"]]
        own = {
            **config,
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": jobs,
        }
        (root / "prometheus.yml").write_text(yaml.safe_dump(own))
        self.server = Server(
            "prometheus",
            ["prometheus", f"--config.file={root}/prometheus.yml", f"--storage.tsdb.path={root}/data"]
            + [f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"],
            log_dir,
            ready=lambda: requests.get(f"{self.url}/-/ready", timeout=2).status_code == 200,
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query's series; AssertionError with Prometheus' own words where it refuses it."""
        return self._ask("query", {"query": expression})

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Series with their points between two Unix times."""
        asked = {"query": expression, "start": start, "end": end, "step": step}
        return self._ask("query_range", asked)

    def _ask(self, what: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        answer = requests.get(f"{self.url}/api/v1/{what}", params=dict(parameters), timeout=10).json()
        assert answer["status"] == "success", (parameters, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def rules(self) -> dict[str, str]:
        """Health of each alert by its name: `ok`, or what its evaluation failed with."""
        answer = requests.get(f"{self.url}/api/v1/rules", timeout=10).json()
        return {
            rule["name"]: rule.get("lastError") or rule["health"]
            for group in answer["data"]["groups"]
            for rule in group["rules"]
        }

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
