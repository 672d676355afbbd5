"""What the harness promises of the servers that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness.process import PORTS, Server, free_port, wait_until

ROOT = Path(__file__).parents[2]

STARTER = """
    import signal, sys, time
    from pathlib import Path
    # who is started in the background inherits that it is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from tests.harness.process import Server, wait_until
    folder = Path(sys.argv[1])
    servers = [
        # a server with a child of its own
        Server("family", ["sh", "-c", "sleep 600 & echo $! > child; wait"], folder, cwd=folder),
        Server("frozen", ["sleep", "600"], folder),
        Server("ended", ["true"], folder),
    ]
    for server in servers:
        server.launch()
    servers[1].freeze()
    servers[2].wait(20)
    wait_until(lambda: (folder / "child").exists() and (folder / "child").read_text().endswith("\\n"), 20)
    print(servers[0].pid, (folder / "child").read_text().strip(), servers[1].pid, flush=True)
    time.sleep(600)
"""


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(") ")[2][0] != "Z"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_the_process_that_started_it(end: signal.Signals, tmp_path: Path) -> None:
    """However that one ends; servers' children and frozen servers go too."""
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STARTER), str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        assert len(pids) == 3 and all(map(runs, pids))
        starter.send_signal(end)
        starter.wait(60)
        wait_until(lambda: not any(map(runs, pids)), 10, "the end of every server")
    finally:
        starter.kill()
        starter.communicate()


def test_neither_a_worker_nor_its_servers_outlive_the_process_that_shares_tests_out(tmp_path: Path) -> None:
    (tmp_path / "test_of_a_worker.py").write_text(
        textwrap.dedent("""
            import os, time
            from pathlib import Path
            from tests.harness.process import Server

            def test_that_waits():
                here = Path(__file__).parent
                server = Server("waiting", ["sleep", "600"], here).start()
                (here / "new").write_text(f"{os.getpid()} {server.pid}")
                (here / "new").rename(here / "pids")
                time.sleep(600)
        """)
    )
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull, "-n", "1"]
    sharing = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until((tmp_path / "pids").exists, 30, "a test that runs")
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2 and all(map(runs, pids))
        sharing.kill()
        wait_until(lambda: not any(map(runs, pids)), 10, "the end of the worker and of its server")
    finally:
        sharing.kill()
        sharing.wait()


def test_ports_are_given_out_once_and_are_none_of_outgoing_connections() -> None:
    """Over processes, too; a connection of somebody's must not sit on the port of a server that restarts."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    mine = {free_port() for _ in range(50)}
    assert len(mine) == 50
    script = (
        "from tests.harness.process import _claim; import sys; print([_claim(int(p)) for p in sys.argv[1:]])"
    )
    other = subprocess.run(
        [sys.executable, "-c", script, *map(str, mine)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == str([False] * 50)
    assert max(mine) in PORTS and max(PORTS) < low


def test_a_server_that_ends_before_it_is_ready_shows_its_last_words(tmp_path: Path) -> None:
    server = Server("broken", ["sh", "-c", "echo out of order; exit 3"], tmp_path, ready=lambda: False)
    with pytest.raises(Exception, match=r"(?s)ended with status 3 before it was ready.*out of order"):
        server.start()
    assert os.path.exists(tmp_path / "broken.log")
