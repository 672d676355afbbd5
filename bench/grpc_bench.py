"""Pushes a second that the gRPC source takes, beside plain echo servers of the same library.

    python bench/grpc_bench.py [--secs 3] [--rounds 3] [--senders 16]

Server and senders are processes of their own; a round runs every server once with every batch size, so
that noise of the machine meets all of them. Printed is the median over the rounds. The echo servers parse
the message and answer; the source also queues it, and a thread takes the records out again.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import grpc.aio

from archiver.settings.models import Grpc
from archiver.sources.grpc import SERVICE, GrpcSource
from archiver.sources.wire import transport_pb2 as wire

BATCHES = (1, 100, 1000)
SERVERS = ("echo-aio", "echo-threads", "source")
RECORD_BYTES = 416
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 16 << 20))


def serve(kind: str) -> None:
    """Print the port, serve until stdin ends, print how many records were taken."""
    {"echo-aio": _echo_aio, "echo-threads": _echo_threads, "source": _source}[kind]()


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
    source = GrpcSource(Grpc(listen="127.0.0.1:0"))
    source.start(None)  # type: ignore[arg-type]
    done, records = threading.Event(), 0

    def drain() -> None:
        nonlocal records
        while (batches := source.take(0.05)) or not done.is_set():
            records += sum(len(batch.values) for batch in batches)

    thread = threading.Thread(target=drain)
    thread.start()
    _announce(source.port)
    done.set()
    thread.join()
    source.close(5)
    print(records, flush=True)


async def send(port: int, batch: int, secs: float, senders: int) -> tuple[int, float]:
    """Accepted pushes and seconds. A refused push is sent again after 10 ms, as senders do."""
    line = b'{"_org_id":"acme","message":"' + b"a" * (RECORD_BYTES - 32) + b'"}\n'
    body = wire.PushRequest(payload=line * batch, format=wire.JSON).SerializeToString()
    sent = 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        push = channel.unary_unary(f"/{SERVICE}/Push", None, None)
        await push(body)
        until = time.monotonic() + secs

        async def sender() -> None:
            nonlocal sent
            while time.monotonic() < until:
                try:
                    await push(body)
                    sent += 1
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise
                    await asyncio.sleep(0.01)

        began = time.monotonic()
        await asyncio.gather(*[sender() for _ in range(senders)])
        return sent, time.monotonic() - began


def measure(kind: str, secs: float, senders: int) -> dict[int, float]:
    """Records a second by batch size. For the source, every accepted record must have been taken."""
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(server.stdout.readline())
        rates, pushed = {}, 0
        for batch in BATCHES:
            sent, took = asyncio.run(send(port, batch, secs, senders))
            rates[batch] = sent * batch / took
            pushed += (sent + 1) * batch
        server.stdin.close()
        rest = server.stdout.read().split()
    if kind == "source" and int(rest[0]) != pushed:
        sys.exit(f"pushed and answered {pushed} records, taken {rest[0]}")
    return rates


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
    heads = " ".join(f"{kind + ' rec/s':>19}" for kind in SERVERS)
    print(f"{'records a push':>14} {heads}  of the faster echo")
    for batch in BATCHES:
        rates = {kind: statistics.median(run[kind][batch] for run in rounds) for kind in SERVERS}
        ratio = rates["source"] / max(rates["echo-aio"], rates["echo-threads"])
        print(f"{batch:>14} " + " ".join(f"{rates[kind]:>19,.0f}" for kind in SERVERS) + f"  {ratio:.2f}")


if __name__ == "__main__":
    main()
