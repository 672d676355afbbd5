"""Keeps what grants access out of texts that are not ours: SDK errors and the log lines below the SDKs.

A SAS signature and a resumable session's id travel in the URL's query, so every HTTP error and urllib3's
debug lines carry them.
"""

from __future__ import annotations

import logging
import re

DETAIL_CHARS_MAX = 400

_IN_QUERY = re.compile(
    r"(?P<name>\b(?:sig|upload_id|access_token|token|assertion|client_secret|X-Goog-Signature))=[^&\s'\"<>)]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(?P<name>Bearer|SharedKey)\s+[^\s'\",]+", re.IGNORECASE)

_TEXT_LOGGERS = (
    "urllib3.connectionpool",
    "urllib3.util.retry",
    "requests_oauthlib",
    "msal.application",
    "azure.core.pipeline.policies.http_logging_policy",
    "azure.identity",
)
_BODY_LOGGERS = ("google.auth.transport.requests", "google.auth.transport.urllib3")


def redacted(text: str) -> str:
    """The text with the values of signatures, tokens and session ids replaced by `***`."""
    text = _IN_QUERY.sub(r"\g<name>=***", text)
    return _BEARER.sub(r"\g<name> ***", text)


def detail_of(error: BaseException) -> str:
    """An error's own words on one line of bounded length, redacted; its class where it has none."""
    words = " ".join(redacted(str(error)).split())
    return words[:DETAIL_CHARS_MAX] or type(error).__name__


class _RedactText(logging.Filter):
    """Renders the line early, so that whatever formats it later sees redacted text only."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = redacted(record.getMessage())
        record.args = ()
        return True


class _DropBodies(logging.Filter):
    """google-auth's debug lines carry whole requests beside the message, a signed assertion among them."""

    def filter(self, record: logging.LogRecord) -> bool:
        for field in ("httpRequest", "httpResponse"):
            record.__dict__.pop(field, None)
        return True


_redact_text = _RedactText()
_drop_bodies = _DropBodies()


def redact_sdk_logs() -> None:
    """Install the filters; any number of calls is one."""
    for name in _TEXT_LOGGERS:
        logging.getLogger(name).addFilter(_redact_text)
    for name in _BODY_LOGGERS:
        logging.getLogger(name).addFilter(_drop_bodies)
