"""`deploy/compose` as Docker Compose itself reads it, and as a Kafka broker and SeaweedFS take it."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "compose"

NETWORK = ("listener", "advertised.listeners", "controller", "inter.broker.listener.name", "log.dirs")
"""What depends on where a broker runs: names of listeners, ports, folders."""


def resolved(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`docker compose config`, variables and all; AssertionError with its own words where it refuses."""
    program = Path(sysconfig.get_path("scripts")) / "docker-compose"
    done = subprocess.run(
        [str(program), "-f", str(FOLDER / "compose.yaml"), "config", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return cast(dict[str, Any], json.loads(done.stdout))


def broker_properties(compose: Mapping[str, Any]) -> dict[str, str]:
    """Kafka's variables as the properties that its image makes of them, less those of the network."""
    environment = compose["services"]["kafka"]["environment"]
    properties = {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value for name, value in environment.items()
    }
    return {name: value for name, value in properties.items() if not name.startswith(NETWORK)}
