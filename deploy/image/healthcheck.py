"""The image's HEALTHCHECK: ends with 0 while `/healthz` says that the archiver is alive.

It looks where the environment says the archiver listens, else at port 9090; an address that only the
YAML file has is not seen.
"""

from __future__ import annotations

import http.client
import os
import sys

listen = os.environ.get("DFE_ARCHIVER_METRICS__LISTEN") or os.environ.get("METRICS_ADDR") or ":9090"
host, _, port = listen.rpartition(":")
host = host.strip("[]")
if host in ("", "0.0.0.0"):
    host = "127.0.0.1"
elif host == "::":
    host = "::1"

try:
    connection = http.client.HTTPConnection(host, int(port), timeout=4)
    connection.request("GET", "/healthz")
    answer = connection.getresponse()
    print(answer.read().decode().strip())
    sys.exit(answer.status != 200)
except (OSError, ValueError, http.client.HTTPException) as error:
    print(f"{host}:{port}: {error}")
    sys.exit(1)
