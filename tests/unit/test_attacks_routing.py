"""What an adversary tries on routing: fields inside one another, tables that many topics fill."""

from __future__ import annotations

import pytest

from archiver.domain.batch import RecordBatch, TopicPartition
from archiver.domain.routing import CACHE_BYTES_MAX, Router

BOTH = ([b'{"a":{"b":"x"}}'], ["t/default/x", "not_scalar"])
OUTER = ([b'{"a":"q"}'], ["t/q/default", "missing"])


def routed(router: Router, values: list[bytes], topic: str = "t") -> list[str]:
    """The routes of the values' slices, and the reasons of those that went to the default segment."""
    result = router.route_batch(RecordBatch(TopicPartition(topic, 0), values, range(len(values))))
    return [part.route for part in result.slices] + list(result.defaulted)


@pytest.mark.parametrize(("values", "expected"), [BOTH, OUTER])
@pytest.mark.parametrize("count", [1, 20])
def test_of_two_fields_one_inside_the_other_an_object_is_no_value(
    values: list[bytes], expected: list[str], count: int
) -> None:
    """[K6]: with `a` and `a.b` configured, a record whose `a` is an object has no `a` to route by."""
    assert routed(Router(["a", "a.b"], "default", with_topic=True), values * count) == expected


def test_many_topics_share_one_bound_for_what_is_remembered_of_their_values() -> None:
    """[B1]: a table for each topic, full, would be gigabytes with hundreds of topics."""
    router = Router(["o"], "default", with_topic=True)
    for n in range(45):
        routed(router, [b'{"o":"%s-%d"}' % (b"v" * 1_000, i) for i in range(800)], topic=f"topic-{n}")
    held = sum(len(key) for routes in router._routes.values() for key in routes)
    assert held <= CACHE_BYTES_MAX + (1 << 20)
