"""The real archiver as a process: `python -m archiver run` with settings of a test, watched over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.archive import Archive, read_archive
from tests.harness.process import Server, free_port, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
HTTP_TIMEOUT_SECS = 20
OWN_VARIABLES = ("DFE_ARCHIVER_", "KAFKA_", "S3_", "DLQ_", "METRICS_", "LOG_")

__all__ = ["Daemon", "Metrics", "merged", "wait_until"]


class Metrics(dict[tuple[str, tuple[tuple[str, str], ...]], float]):
    """Samples of one scrape by name (without `dfe_archiver_`) and sorted labels."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the text exposition format."""
        samples = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(sorted(sample.labels.items()))
                samples[sample.name.removeprefix("dfe_archiver_"), labels] = float(sample.value)
        return samples

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of `name` that carry all these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(
            value for (found, held), value in self.items() if found == name and wanted <= dict(held).items()
        )


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `more` laid over it, section by section."""
    result = dict(base)
    for key, value in more.items():
        held = result.get(key)
        both = isinstance(held, Mapping) and isinstance(value, Mapping)
        result[key] = merged(cast(Mapping[str, Any], held), value) if both else value
    return result


class Daemon:
    """One archiver with its configuration, spool and (unless set otherwise) archive under `root`.

    `settings` are laid over: a `file://` archive, JSON logs, HTTP on a free port of 127.0.0.1, a commit
    every second. The environment's own archiver and SDK variables are unset; `env` adds to it. `prefix`
    goes before the command, for example `["prlimit", "--nofile=256"]`. `port`, `root` and the spool stay
    over `stop`, `kill` and `start`, so a second `start` is the restart after a crash.
    """

    def __init__(
        self,
        root: Path,
        log_dir: Path,
        settings: Mapping[str, Any],
        *,
        name: str = "archiver",
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        ready_timeout_secs: float = 30,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.port = free_port()
        self.settings = merged(self._defaults(), settings)
        self.config_path = root / "archiver.yaml"
        self.server = Server(
            name,
            [*prefix, sys.executable, "-m", "archiver", "run", "--config", str(self.config_path)],
            log_dir,
            env={**self._environment(), **(env or {})},
            cwd=root,
            ready=lambda: self.get("/readyz")[0] == 200,
            ready_timeout_secs=ready_timeout_secs,
        )

    def _defaults(self) -> dict[str, Any]:
        return {
            "kafka": {"commit_interval_secs": 1},
            "archive": {"destination": f"file://{self.root}/archive"},
            "buffer": {"spool_dir": str(self.root / "spool"), "min_free_disk_bytes": "64MiB"},
            "metrics": {"listen": f"127.0.0.1:{self.port}"},
            "log": {"format": "json"},
        }

    @staticmethod
    def _environment() -> dict[str, str]:
        # an empty variable is unset [C1]
        unset = {name: "" for name in os.environ if name.startswith(OWN_VARIABLES)}
        return {
            **unset,
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "",
        }

    # --- the process -------------------------------------------------------------------------

    def start(self) -> Self:
        """Write the configuration, start, wait for `/readyz`."""
        self.launch()
        self.wait_ready()
        return self

    def launch(self) -> Self:
        """Write the configuration and start without waiting."""
        self.config_path.write_text(yaml.safe_dump(self.settings))
        self.server.launch()
        return self

    def wait_ready(self, timeout_secs: float | None = None) -> None:
        """Wait for `/readyz` to answer 200; `ServerError` with the log's tail where it does not."""
        self.server.wait_ready(timeout_secs)

    def stop(self, timeout: float = 90) -> int | None:
        """SIGTERM; the exit status. A daemon that outlives `timeout` is killed (status −9)."""
        return self.server.stop(timeout)

    def kill(self) -> int | None:
        """SIGKILL, as a crash."""
        return self.server.kill()

    def wait(self, timeout: float = 40) -> int:
        """Wait for it to end by itself; the exit status."""
        return self.server.wait(timeout)

    def freeze(self) -> None:
        """SIGSTOP, as a machine that hangs."""
        self.server.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        self.server.thaw()

    @property
    def pid(self) -> int:
        """Process id."""
        return self.server.pid

    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def output(self) -> str:
        """Everything it has written to stdout and stderr, over all starts."""
        return self.server.output()

    def logs(self) -> list[dict[str, Any]]:
        """Its log lines as objects; a line that is not JSON fails, since [O4] allows none."""
        return [json.loads(line) for line in self.output().splitlines()]

    def __enter__(self) -> Self:
        return self if self.server.running else self.start()

    def __exit__(self, *_: object) -> None:
        self.server.kill()

    # --- what it says ------------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET; `OSError` where nobody answers."""
        return self._ask("GET", path)

    def post(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Status and body of a POST without a body."""
        return self._ask("POST", path, headers or {})

    def _ask(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HTTP_TIMEOUT_SECS)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        """`/status`."""
        return cast(dict[str, Any], json.loads(self.get("/status")[1]))

    def metrics(self) -> Metrics:
        """`/metrics`, parsed."""
        return Metrics.parse(self.get("/metrics")[1])

    def roll(self) -> None:
        """Ask for every open file to be sealed [R2]."""
        code, body = self.post("/ops/roll")
        assert code in (200, 202), f"/ops/roll: {code} {body}"

    def archive(self, *, template_segments: int = 4) -> Archive:
        """What is under its `file://` destination, read by the codecs' own tools."""
        destination = str(self.settings["archive"]["destination"])
        assert destination.startswith("file://"), destination
        return read_archive(Path(destination.removeprefix("file://")), template_segments=template_segments)
