"""Records made to confuse a decoder that takes many at once, and the route each must get alone."""

from __future__ import annotations

import random

ORGS = ("a", "b", "c")


def hostile_value(rng: random.Random) -> bytes:
    """One record's value, of some kind that has broken a batch decoder somewhere."""
    org = rng.choice(ORGS)
    good = f'{{"_org_id":"{org}","n":{rng.randrange(100)}}}'.encode()
    return rng.choice(_KINDS)(rng, org, good)


_KINDS = (
    lambda rng, org, good: good,
    lambda rng, org, good: good,
    lambda rng, org, good: good,
    lambda rng, org, good: b"",
    lambda rng, org, good: good + b"\n" + f'{{"_org_id":"{rng.choice(ORGS)}"}}'.encode(),
    lambda rng, org, good: good + good,
    lambda rng, org, good: good + b" " + good,
    lambda rng, org, good: good[: rng.randrange(1, len(good))],
    lambda rng, org, good: good[rng.randrange(1, len(good)) :],
    lambda rng, org, good: good.replace(b",", b",\n  "),
    lambda rng, org, good: b"\n" + good,
    lambda rng, org, good: good + b"\r\n",
    lambda rng, org, good: b'{"_org_id":NaN}',
    lambda rng, org, good: f'{{"_org_id":"x","_org_id":"{org}"}}'.encode(),
    lambda rng, org, good: b'{"x":' + b"[" * 3000 + b"]" * 3000 + f',"_org_id":"{org}"}}'.encode(),
    lambda rng, org, good: b"\xef\xbb\xbf" + good,
    lambda rng, org, good: b'{"_org_id":"\xff"}',
    lambda rng, org, good: f'{{"_org_id":"{org}","bad":"'.encode() + b'\xff\xfe"}',
    lambda rng, org, good: (
        f'{{"_org_id":{rng.choice(["1.00", "1e400", "-0", "123", "true", "null"])}}}'.encode()
    ),
    lambda rng, org, good: b'{"_org_id":"\\ud800"}',
    lambda rng, org, good: f'{{"_org_id":"\\u006{rng.choice("123")}"}}'.encode(),
    lambda rng, org, good: rng.choice([b"{}", b"[]", b"null", b'"x"', b"{", b"}", b"}{", b"{}{}", b"{}\n{}"]),
    lambda rng, org, good: f'{{"_org_id":"{org}"}}garbage'.encode(),
    lambda rng, org, good: f'{{"a":"}}\n{{","_org_id":"{org}"}}'.encode(),
    lambda rng, org, good: b'{"a":"}',
    lambda rng, org, good: f'{{","_org_id":"{org}"}}'.encode(),
    lambda rng, org, good: b'{"a":[{}',
    lambda rng, org, good: b"{" + bytes(rng.randrange(256) for _ in range(rng.randrange(12))) + b"}",
    lambda rng, org, good: f'{{"_org_id":{{"x":"{org}"}}}}'.encode(),
    lambda rng, org, good: f'{{"_org_id":"","tags":{{"category":"{org}"}}}}'.encode(),
    lambda rng, org, good: f'{{"tags":{rng.choice(["null", "1", "[]", "{}"])},"_org_id":"{org}"}}'.encode(),
)
