"""The usual push, read without protobuf, which copies the payload twice before it can be looked at.

Of the wire format it knows the one form that senders' libraries write where there is no metadata; all else is
protobuf's to judge.
"""

from __future__ import annotations

_PAYLOAD, _FORMAT = 0x0A, 0x10
"""Tags of `PushRequest`: field 1 as bytes, field 2 as a number."""
_LENGTH_BYTES_MAX = 5
_LOW_BITS = 0x7F


def plain_push(message: bytes) -> tuple[int, int, int] | None:
    """Where the payload of a `PushRequest` starts and stops, and its format's number.

    None where the message is anything but a payload and, at most, a format of one byte behind it.
    """
    if len(message) < 2 or message[0] != _PAYLOAD:
        return None
    length = shift = 0
    at = 1
    for byte in message[1 : 1 + _LENGTH_BYTES_MAX]:
        at += 1
        length |= (byte & _LOW_BITS) << shift
        if byte <= _LOW_BITS:
            break
        shift += 7
    else:
        return None
    stop = at + length
    if stop == len(message):
        return at, stop, 0
    if stop + 2 == len(message) and message[stop] == _FORMAT and message[stop + 1] <= _LOW_BITS:
        return at, stop, message[stop + 1]
    return None
