"""Outages, as librdkafka tells them, become few events: trouble with its way out, and the recovery."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import confluent_kafka as ck

from archiver.events import BrokerRecovered, BrokerTrouble
from archiver.ports import Clock, Emit

REPEAT_SECS = 30.0
QUIET_SECS = 5.0
"""One broker of several may fail while others answer: recovery needs a while without a failure."""

_Code = ck.KafkaError

_UNREACHABLE = "check kafka.brokers, kafka.security_protocol, the network and whether the brokers run"
_LOGIN = "check kafka.sasl_mechanism, kafka.sasl_user, kafka.sasl_password and kafka.security_protocol"
_TLS = "check kafka.ssl_ca_location, the client certificate, and kafka.security_protocol"
_WAYS_OUT = {
    _Code._TRANSPORT: _UNREACHABLE,
    _Code._TIMED_OUT: _UNREACHABLE,
    _Code._RESOLVE: "check the host names in kafka.brokers and the advertised listeners of the brokers",
    _Code._ALL_BROKERS_DOWN: _UNREACHABLE,
    _Code._AUTHENTICATION: _LOGIN,
    _Code.SASL_AUTHENTICATION_FAILED: _LOGIN,
    _Code.UNSUPPORTED_SASL_MECHANISM: _LOGIN,
    _Code._SSL: _TLS,
    _Code.TOPIC_AUTHORIZATION_FAILED: "allow Read and Describe on the topic to our principal",
    _Code.GROUP_AUTHORIZATION_FAILED: "allow Read on the group kafka.group_id to our principal",
    _Code._MAX_POLL_EXCEEDED: "raise kafka.max_poll_interval_ms or lower kafka.drain_timeout_secs",
    _Code.INVALID_SESSION_TIMEOUT: "set kafka.session_timeout_ms within the broker's group.min and group.max",
    _Code.INCONSISTENT_GROUP_PROTOCOL: "another member of the group uses other assignors or another "
    "group_protocol: give the archiver a kafka.group_id of its own",
    _Code.FENCED_INSTANCE_ID: "another process runs with the same kafka.group_instance_id: make it unique",
    _Code.MSG_SIZE_TOO_LARGE: "raise receive.message.max.bytes and fetch.max.bytes in kafka.client",
}
_AWAY = frozenset(
    {
        _Code._ALL_BROKERS_DOWN,
        _Code._AUTHENTICATION,
        _Code._SSL,
        _Code.SASL_AUTHENTICATION_FAILED,
        _Code.UNSUPPORTED_SASL_MECHANISM,
    }
)
FATAL = frozenset({_Code._FATAL, _Code._FENCED, _Code.FENCED_INSTANCE_ID})
"""The client cannot be used on; `KafkaError.fatal()` alone does not say so for an event of `consume`."""


def way_out(code: int) -> str:
    """What the operator can look at; empty where nothing general can be said."""
    return _WAYS_OUT.get(code, "")


@dataclass(slots=True)
class _Outage:
    since: float
    failures: int = 0
    failed_at: float = 0.0
    said_at: dict[str, float] = field(default_factory=dict)


class Trouble:
    """Counts failures and tells each kind at once and every 30 s, and the end once. From any thread."""

    def __init__(self, emit: Emit, clock: Clock) -> None:
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()
        self._outage: _Outage | None = None
        self._away: str | None = None

    @property
    def away(self) -> str | None:
        """Why the cluster cannot be used at all, until something succeeds again."""
        return self._away

    def failed(self, error: ck.KafkaError) -> None:
        """One error from the client."""
        detail = error.str()
        # "3/3 brokers are down" would hide the cause, which came just before
        if error.code() in _AWAY and (error.code() != _Code._ALL_BROKERS_DOWN or self._away is None):
            self._away = detail
        self._count(error.name(), detail, way_out(error.code()))

    def unanswered(self, question: str) -> None:
        """A question to the cluster timed out or failed."""
        if self._away is None:
            self._away = f"no answer to {question}"
        self._count("NO_ANSWER", f"no answer to {question}", _UNREACHABLE)

    def answered(self) -> None:
        """The cluster has just answered something."""
        self._away = None
        with self._lock:
            outage, now = self._outage, self._clock.monotonic()
            if outage is None or now - outage.failed_at < QUIET_SECS:
                return
            self._outage = None
        self._emit(BrokerRecovered(failures=outage.failures, secs=now - outage.since))

    def _count(self, code: str, detail: str, advice: str) -> None:
        with self._lock:
            now = self._clock.monotonic()
            outage = self._outage = self._outage or _Outage(since=now)
            outage.failures += 1
            outage.failed_at = now
            if now - outage.said_at.get(code, float("-inf")) < REPEAT_SECS:
                return
            outage.said_at[code] = now
        self._emit(BrokerTrouble(code=code, detail=detail, way_out=advice))
