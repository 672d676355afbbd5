"""The checked-in protocol code is what the .proto says [G3]."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from archiver.sources.wire import transport_pb2 as wire
from archiver.sources.wire.plain import plain_push

WIRE = Path(__file__).parents[2] / "archiver" / "sources" / "wire"
PACKAGE = "scalo/transport/v1"


@pytest.mark.parametrize("name", ["transport_pb2.py", "transport_pb2.pyi"])
def test_generated_code_is_what_the_proto_file_gives(tmp_path: Path, name: str) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{PACKAGE}={WIRE}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            f"{PACKAGE}/transport.proto",
        ],
        check=True,
    )
    assert (WIRE / name).read_text() == (tmp_path / PACKAGE / name).read_text()


def test_field_numbers_are_the_contract() -> None:
    """[G3], written out once more from the contract, byte by byte."""
    push = wire.PushRequest(payload=b"p", format=wire.JSON, metadata={"k": "v"})
    assert push.SerializeToString() == b"\x0a\x01p\x10\x01\x1a\x06\x0a\x01k\x12\x01v"
    record = wire.Record(
        payload=b"p",
        key="k",
        headers=[wire.Header(key="h", value=b"\xff")],
        timestamp_ms=5,
        has_timestamp_ms=True,
        format=wire.ARROW_IPC,
    )
    encoded = b"\x0a\x01p\x12\x01k\x1a\x06\x0a\x01h\x12\x01\xff\x20\x05\x28\x01\x30\x03"
    assert record.SerializeToString() == encoded
    assert wire.Batch(records=[record]).SerializeToString() == b"\x0a" + bytes([len(encoded)]) + encoded
    assert wire.PushResponse(accepted=7).SerializeToString() == b"\x08\x07"
    assert wire.BatchAck(accepted=7).SerializeToString() == b"\x08\x07"
    not_serving = wire.HealthCheckResponse(status=wire.HealthCheckResponse.NOT_SERVING)
    assert not_serving.SerializeToString() == b"\x08\x01"
    assert dict(wire.Format.items()) == {"AUTO": 0, "JSON": 1, "MSGPACK": 2, "ARROW_IPC": 3}
    assert dict(wire.HealthCheckResponse.Status.items()) == {"SERVING": 0, "NOT_SERVING": 1}


def read_by_protobuf(message: bytes) -> tuple[bytes, int, dict[str, str]] | None:
    try:
        read = wire.PushRequest.FromString(message)
    except DecodeError:
        return None
    return read.payload, read.format, dict(read.metadata)


def read_plainly(message: bytes) -> tuple[bytes, int, dict[str, str]] | None:
    found = plain_push(message)
    return found and (message[found[0] : found[1]], found[2], {})


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 16383, 16384, 1 << 20, 1 << 21])
@pytest.mark.parametrize("number", [0, 1, 3, 127])
def test_the_usual_push_is_read_without_protobuf(size: int, number: int) -> None:
    message = wire.PushRequest(payload=b"\n" * size, format=number).SerializeToString()  # type: ignore[arg-type]
    assert read_plainly(message) == read_by_protobuf(message) == (b"\n" * size, number, {})


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x10\x01",  # no payload
        b"\x0a\x01p\x0a\x00",  # a second payload, which counts
        b"\x0a\x01p\x20\x01",  # a field that is not known
        b"\x0a\x01p\x18\x01",  # metadata that are a number
        b"\x0a\x01p\x10\x81\x00",  # a longer format
        b"\x0a\x01p\x10\x81",  # one that is cut off
        b"\x0a\x01p\x10",
        b"\x0a\x01",
        b"\x0a\x80\x80\x80\x80\x80\x00",
        b"\x0a",
        b"\x12\x01p",
        b"\x0a\x01p\x1a\x06\x0a\x01k\x12\x01v",
    ],
)
def test_any_other_push_is_left_to_protobuf(message: bytes) -> None:
    assert plain_push(message) is None


PARTS = st.sampled_from(
    [
        b"",
        b"\x0a",
        b"\x00",
        b"\x01",
        b"\x02",
        b"\x03ab\n",
        b"\x80",
        b"\x81\x00",
        b"\xff\xff\xff\xff\x0f",
        b"\x10",
    ]
    + [
        b"\x10\x01",
        b"\x10\x7f",
        b"\x10\x80",
        b"\x10\x80\x01",
        b"\x1a\x06\x0a\x01k\x12\x01v",
        b"\x0a\x01p",
        b"\x22\x00",
    ]
    + [b"\x80\x80\x80\x80\x00", b"\x80\x80\x80\x80\x10", b"\x80\x80\x80\x80\x80\x00", b"abc"]
)


@given(st.lists(PARTS, max_size=5).map(b"".join) | st.binary(max_size=8))
def test_what_is_read_without_protobuf_is_what_protobuf_reads(message: bytes) -> None:
    """[G3]: it may not know a message, but is never of another mind."""
    for whole in (message, b"\x0a" + message):
        assert read_plainly(whole) in (None, read_by_protobuf(whole))
