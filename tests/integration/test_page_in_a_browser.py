"""The status page in a real browser ([O2]): whatever stands in it, it asks nobody else and runs nothing."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from archiver.telemetry import HttpServer, Telemetry
from tests.unit.telemetry_samples import FILES, PARTITIONS, a_status

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=2000",
]


def chromium(profile: Path, *arguments: str) -> str:
    command = ["chromium", *OPTIONS, f"--user-data-dir={profile}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


@pytest.fixture
def elsewhere() -> Iterator[ThreadingHTTPServer]:
    """Another host that the page might be tricked into asking; remembers what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = asked  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_browser_shows_the_page_and_nothing_in_it_comes_alive(
    tmp_path: Path, elsewhere: ThreadingHTTPServer
) -> None:
    url = f"http://127.0.0.1:{elsewhere.server_address[1]}"
    trap = f"<img src={url}/image onerror=fetch('{url}/script')><script>document.title='owned'</script>"
    telemetry = Telemetry()
    server = HttpServer("127.0.0.1:0", telemetry.status, telemetry.registry, lambda: None, None, 30)
    server.start()
    try:
        files = tuple(replace(file, route=trap, key=trap) for file in FILES)
        partitions = tuple(replace(p, topic=trap) for p in PARTITIONS)
        telemetry.status.publish(
            replace(a_status(), not_ready=("paused: " + trap,), oldest=files, partitions=partitions)
        )
        shown = chromium(tmp_path / "profile", "--dump-dom", f"http://127.0.0.1:{server.port}/")
        picture = tmp_path / "page.png"
        chromium(
            tmp_path / "profile",
            f"--screenshot={picture}",
            "--window-size=390,1200",
            f"http://127.0.0.1:{server.port}/",
        )
    finally:
        server.stop()
        telemetry.close()
    assert "paused: &lt;img" in shown and "owned</title>" not in shown
    assert elsewhere.asked == []  # type: ignore[attr-defined]
    assert picture.stat().st_size > 10_000
