"""Records a second that the gRPC source and the archiver take, beside plain echo servers of the library.

    python -m bench.grpc_bench [--secs 3] [--rounds 3] [--senders 16]

Server and senders are processes of their own; a round runs every server once with every batch size, so
that noise of the machine meets all of them. Printed are medians over the rounds: of rates, of the CPU time
that server and senders take for a push, and of each round's own ratio to the faster echo. On a machine that
is busy otherwise the ratio of CPU times says more: who has more threads gets more of what it is short of.

The echo servers parse the message and answer. The source also queues it, and a thread takes the records out
again. The archiver is the daemon as it runs, with zstd and a `file://` archive; it is stopped and the
archived records are counted: every answered one must be there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from archiver.codecs import CODECS, read_all
from archiver.settings.models import Grpc
from archiver.sources.grpc import SERVICE, GrpcSource
from archiver.sources.wire import transport_pb2 as wire

ROOT = Path(__file__).parents[1]
BATCHES = (1, 100, 1000)
ECHOES = ("echo-aio", "echo-threads")
SERVERS = (*ECHOES, "source", "archiver")
RECORD_BYTES = 416
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 << 20))


def serve(kind: str) -> None:
    """Print the port, serve until stdin ends, print how many records were taken."""
    servers = {"echo-aio": _echo_aio, "echo-threads": _echo_threads, "source": _source, "archiver": _archiver}
    servers[kind]()


def _announce(port: int | None) -> None:
    print(port, flush=True)
    sys.stdin.read()


def _answer(request: wire.PushRequest) -> wire.PushResponse:
    return wire.PushResponse(accepted=len(request.payload))


def _echo_handler(behaviour: Any) -> grpc.GenericRpcHandler[Any, Any]:
    method = grpc.unary_unary_rpc_method_handler(
        behaviour, wire.PushRequest.FromString, wire.PushResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Push": method})


def _echo_threads() -> None:
    server = grpc.server(ThreadPoolExecutor(8), options=OPTIONS)
    server.add_generic_rpc_handlers((_echo_handler(lambda request, _context: _answer(request)),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _announce(port)
    server.stop(0)


def _echo_aio() -> None:
    async def push(request: wire.PushRequest, _context: object) -> wire.PushResponse:
        return _answer(request)

    async def main() -> None:
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((_echo_handler(push),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await asyncio.get_running_loop().run_in_executor(None, _announce, port)
        await server.stop(0)

    asyncio.run(main())


def _source() -> None:
    source = GrpcSource(Grpc(listen="127.0.0.1:0"), lambda _event: None)
    source.start(None)  # type: ignore[arg-type]
    done, records = threading.Event(), 0

    def drain() -> None:
        nonlocal records
        while (batches := source.take(0.05, 1000)) or not done.is_set():
            records += sum(len(batch.values) for batch in batches)

    thread = threading.Thread(target=drain)
    thread.start()
    _announce(source.port)
    done.set()
    thread.join()
    source.close(5)
    print(records, flush=True)


def _archiver() -> None:
    with tempfile.TemporaryDirectory(prefix="grpc-bench-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        settings = {
            "DFE_ARCHIVER_TRANSPORT": "grpc",
            "DFE_ARCHIVER_GRPC_LISTEN": f"127.0.0.1:{port}",
            "DFE_ARCHIVER_DESTINATION": f"file://{folder}/archive",
            "DFE_ARCHIVER_SPOOL_DIR": f"{folder}/spool",
            "METRICS_ADDR": "127.0.0.1:0",
            "LOG_LEVEL": "error",
        }
        argv = [sys.executable, "-m", "archiver", "run"]
        with subprocess.Popen(argv, env=os.environ | settings, cwd=ROOT, stdin=subprocess.DEVNULL) as daemon:
            grpc.channel_ready_future(grpc.insecure_channel(f"127.0.0.1:{port}")).result(30)
            _announce(port)
            daemon.terminate()
            daemon.wait()
        files = Path(folder, "archive").rglob("*.jsonl.zst")
        print(
            sum(piece.count(b"\n") for path in files for piece in read_all(path, CODECS["zstd"])), flush=True
        )


def body(seed: int, batch: int) -> bytes:
    """A push of records of 20 organisations; words drawn at random compress about as logs do."""
    rng = random.Random(seed)
    words = [rng.randbytes(rng.randint(2, 5)).hex() for _ in range(2000)]
    lines = []
    for _ in range(batch):
        text = f'{{"_org_id":"org-{rng.randrange(20)}","message":"' + " ".join(rng.choices(words, k=60))
        lines.append(text[: RECORD_BYTES - 3] + '"}\n')
    return wire.PushRequest(payload="".join(lines).encode(), format=wire.JSON).SerializeToString()


async def send(port: int, batch: int, secs: float, senders: int) -> tuple[int, float]:
    """Accepted pushes and seconds. A refused push is sent again after 10 ms, as senders do."""
    sent = 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        push = channel.unary_unary(f"/{SERVICE}/Push", None, None)
        await push(body(0, batch))
        until = 0.0

        async def sender(mine: bytes) -> None:
            nonlocal sent
            while time.monotonic() < until:
                try:
                    await push(mine)
                    sent += 1
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise
                    await asyncio.sleep(0.01)

        bodies = [body(number, batch) for number in range(senders)]
        began = time.monotonic()
        until = began + secs
        await asyncio.gather(*map(sender, bodies))
        return sent, time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Measured:
    """Records a second, and CPU seconds a push of server and senders together."""

    rate: float
    cpu_secs: float


def cpu_secs(server: psutil.Process) -> float:
    """Of the server, a daemon that it has started, and the senders, which are this process."""
    processes = [psutil.Process(), server, *server.children()]
    return sum(used.user + used.system for used in (process.cpu_times() for process in processes))


def measure(kind: str, secs: float, senders: int) -> dict[int, Measured]:
    """By batch size. A server that says how many records it has must have all that it accepted."""
    with subprocess.Popen(
        [sys.executable, "-m", "bench.grpc_bench", "--serve", kind],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        process, measured, pushed = psutil.Process(server.pid), {}, 0
        for batch in BATCHES:
            before = cpu_secs(process)
            sent, took = asyncio.run(send(port, batch, secs, senders))
            measured[batch] = Measured(sent * batch / took, (cpu_secs(process) - before) / (sent + 1))
            pushed += (sent + 1) * batch
        server.stdin.close()
        rest = server.stdout.read().split()
    if rest and int(rest[0]) != pushed:
        sys.exit(f"{kind}: pushed and answered {pushed} records, found {rest[0]}")
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--secs", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--senders", type=int, default=16, help="pushes under way at once")
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    rounds = []
    for _ in range(options.rounds):
        rounds.append({kind: measure(kind, options.secs, options.senders) for kind in SERVERS})
    print(f"{'records a push':>14} " + " ".join(f"{kind + ' rec/s':>19}" for kind in SERVERS))
    for batch in BATCHES:
        rates = [statistics.median(run[kind][batch].rate for run in rounds) for kind in SERVERS]
        print(f"{batch:>14} " + " ".join(f"{rate:>19,.0f}" for rate in rates))
    print(f"\n{'records a push':>14} " + " ".join(f"{kind + ' CPU ms':>19}" for kind in SERVERS))
    for batch in BATCHES:
        costs = [statistics.median(run[kind][batch].cpu_secs for run in rounds) for kind in SERVERS]
        print(f"{batch:>14} " + " ".join(f"{cost * 1000:>19.3f}" for cost in costs))
    print(f"\n{'records a push':>14}  part of the faster echo's rate, and its CPU time as a part of ours")
    for batch in BATCHES:
        print(f"{batch:>14}  " + "  ".join(_compared(rounds, kind, batch) for kind in ("source", "archiver")))


def _compared(rounds: list[dict[str, dict[int, Measured]]], kind: str, batch: int) -> str:
    """Medians of each round's own ratios."""
    pairs = [(run[kind][batch], max((run[echo][batch] for echo in ECHOES), key=_rate)) for run in rounds]
    rate = statistics.median(ours.rate / echo.rate for ours, echo in pairs)
    cost = statistics.median(echo.cpu_secs / ours.cpu_secs for ours, echo in pairs)
    return f"{kind} {rate:.2f} (CPU {cost:.2f})"


def _rate(measured: Measured) -> float:
    return measured.rate


if __name__ == "__main__":
    main()
