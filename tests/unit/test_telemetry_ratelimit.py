"""[O4]: repeated failures are told at once, then every 30 s with the count left out; so are recoveries."""

from __future__ import annotations

from archiver.telemetry.ratelimit import RateLimiter

THROTTLED = ("UploadRetried", "throttled")
NETWORK = ("UploadRetried", "network")


def test_the_first_is_told_at_once_and_later_ones_once_per_interval_with_the_count() -> None:
    limiter = RateLimiter(30)
    told = [(second, limiter.occurred(THROTTLED, float(second))) for second in range(95)]
    assert [(second, count) for second, count in told if count is not None] == [
        (0, 0),
        (30, 29),
        (60, 29),
        (90, 29),
    ]


def test_scopes_do_not_silence_each_other() -> None:
    limiter = RateLimiter(30)
    assert limiter.occurred(THROTTLED, 0.0) == 0
    assert limiter.occurred(NETWORK, 1.0) == 0


def test_a_recovery_tells_the_whole_count_and_how_long_it_took() -> None:
    limiter = RateLimiter(30)
    for second in range(10):
        limiter.occurred(THROTTLED, float(second))
    limiter.occurred(NETWORK, 10.0)
    recovery = limiter.recovered("UploadRetried", None, 12.0)
    assert recovery is not None
    assert (recovery.failures, recovery.secs, recovery.announced) == (11, 12.0, True)
    assert limiter.recovered("UploadRetried", None, 13.0) is None


def test_a_recovery_of_one_leaves_the_others_open() -> None:
    limiter = RateLimiter(30)
    limiter.occurred(THROTTLED, 0.0)
    limiter.occurred(NETWORK, 0.0)
    assert limiter.recovered("UploadRetried", ("network",), 1.0) is not None
    assert limiter.recovered("UploadRetried", ("network",), 1.0) is None
    assert limiter.recovered("UploadRetried", ("throttled",), 1.0) is not None


def test_what_flaps_is_told_once_per_interval() -> None:
    """c26: a bound that is reached and left several times a second must not fill the log."""
    limiter = RateLimiter(30)
    told = 0
    for tenth in range(600):
        now = tenth / 10
        told += limiter.occurred(("Paused", "memory"), now) is not None
        recovery = limiter.recovered("Paused", ("memory",), now)
        told += recovery is not None and recovery.announced
    assert told == 4


def test_what_fell_silent_and_goes_on_is_told_when_the_interval_ends() -> None:
    """Paused, resumed, paused for good: the log must not end with `resumed`."""
    limiter = RateLimiter(30)
    limiter.occurred(("Paused", "spool"), 0.0, "first")
    limiter.recovered("Paused", ("spool",), 1.0)
    assert limiter.occurred(("Paused", "spool"), 2.0, "second") is None
    assert limiter.overdue(29.0) == []
    assert limiter.overdue(30.0) == [("second", 0)]
    assert limiter.overdue(300.0) == []


def test_what_was_left_out_can_be_told_at_the_end() -> None:
    limiter = RateLimiter(30)
    for second in range(5):
        limiter.occurred(THROTTLED, float(second), second)
    assert limiter.left_out() == [(4, 4)]
    assert limiter.left_out() == []


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    limiter = RateLimiter(30, scopes_max=100)
    for number in range(10_000):
        assert limiter.occurred(("TopicMissing", f"t{number}"), 0.0) == 0
    recovery = limiter.recovered("TopicMissing", None, 1.0)
    assert recovery is not None
    assert recovery.failures == 100
    assert limiter.occurred(("TopicMissing", "t0"), 1.0) == 0
