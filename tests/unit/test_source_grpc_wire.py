"""The checked-in protocol code is what the .proto says [G3]."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from archiver.sources.wire import transport_pb2 as wire

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
