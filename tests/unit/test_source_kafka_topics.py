"""Which topics are archived [C6]."""

from __future__ import annotations

from archiver.sources.kafka_topics import Selection, Subscription

EXISTING = {"events", "events-old", "logs", "__consumer_offsets", "dlq"}


def test_patterns_match_the_whole_name_and_leave_out_internal_and_dead_letter_topics() -> None:
    everything = Selection.of((), (".*",), (), ("dlq",))
    assert everything.among(EXISTING) == {"events", "events-old", "logs"}
    assert Selection.of((), ("event",), (), ()).among(EXISTING) == frozenset()


def test_python_expressions_have_look_ahead_and_exclusion_wins() -> None:
    assert Selection.of((), (r"events(?!-old).*",), (), ()).among(EXISTING) == {"events"}
    assert Selection.of((), (".*s",), ("log.",), ()).among(EXISTING) == {"events"}


def test_a_listed_topic_is_taken_as_it_is_and_missing_ones_are_named_in_order() -> None:
    listed = Selection.of(("zzz", "events", "aaa"), (), ("events",), ("events",))
    assert listed.among(EXISTING) == {"events"}
    assert listed.missing(EXISTING) == ("zzz", "aaa")


def test_list_and_patterns_add_up() -> None:
    both = Selection.of(("dlq",), ("lo.*",), (), ("dlq",))
    assert both.among(EXISTING) == {"dlq", "logs"}


def test_one_listing_without_a_topic_does_not_drop_it_and_two_do() -> None:
    """A broker that has just started may not list everything yet."""
    subscription = Subscription()
    assert subscription.update({"a", "b"}) == (frozenset({"a", "b"}), frozenset())
    assert subscription.update({"a"}) == (frozenset(), frozenset())
    assert subscription.update({"a", "b"}) == (frozenset(), frozenset())
    assert subscription.update({"a"}) == (frozenset(), frozenset())
    assert subscription.update({"a", "c"}) == (frozenset({"c"}), frozenset({"b"}))
    assert subscription.topics == {"a", "c"}
    assert subscription.update({"a", "b", "c"}) == (frozenset({"b"}), frozenset())
