"""Takes secrets out of text, whatever they are wrapped in ([S7]).

Two nets: the secrets that are known, in every spelling a log line gives them, and the shapes that
carry secrets nobody told us (authorization headers, signatures in URLs, session tokens that an SDK
fetched by itself).
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "[redacted]"

TEXT_CHARS_MAX = 16_384
"""A longer text is cut in the log. It is searched for secrets before the cut, up to `SEARCHED_CHARS_MAX`."""

SEARCHED_CHARS_MAX = 262_144

_WHOLE_WORD_UP_TO = 3
"""Secrets this short are only taken out as whole words, or nothing would be left to read."""

_LINE_CHARS_MIN = 16
"""A line of a longer secret (a key in PEM) counts as a secret from this length on."""

_FIELDS_OF_JSON = ("private_key", "private_key_id", "client_secret", "refresh_token", "token")
_FIELDS_OF_PAIRS = ("accountkey", "sharedaccesssignature", "sharedaccesskey", "sig", "password")

_NAMES = (
    r"x-(?:amz|ms|goog|vault|auth)-[a-z-]*(?:token|signature|encryption-key|customer-key|credential)"
    r"|(?:set-)?cookie|api-?key|x-api-key"
    r"|aws_?secret_?access_?key|secret_?access_?key|aws_?session_?token|session_?token"
    r"|access_?token|refresh_?token|id_?token|client_?secret|private_?key(?:_id)?|account_?key"
    r"|shared_?access_?signature|sasl\.password|ssl\.key\.password|sasl_?password|password|passwd"
)
_QUOTED = r"""b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*\""""

_SHAPES = (
    # an authorization header: the rest of the line is its value, unless that is quoted
    re.compile(rf"""(?i)(\b(?:proxy-)?authorization['"]?\s*[:=,]\s*)(?:{_QUOTED}|[^\r\n]+)"""),
    re.compile(rf"""(?i)(\b(?:{_NAMES})['"]?\s*[:=]\s*)(?:{_QUOTED}|[^\s,;&'"<>{{}}]+)"""),
    re.compile(rf"(?i)(<(?:{_NAMES})>)[^<]*"),
    re.compile(r"(?i)(\b(?:bearer|basic|negotiate|sharedkey(?:lite)?) +)[a-z0-9+/=_.:~-]{8,}"),
    re.compile(
        r"(?i)(\b(?:sig|signature|x-amz-signature|x-goog-signature|upload_id|token|assertion)=)[^\s&'\"<>]+"
    ),
    re.compile(r"(?i)(\bsignature['\"]?\s*[:=]\s*)[a-z0-9+/=%]{16,}"),
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),
    re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)(?:(?!-----END).)*", re.DOTALL),
)

_HINT = re.compile(
    r"(?i)auth|token|secret|key|sig|cookie|passw|credential|upload_id|assertion|bearer|basic|negotiate|://|-----"
)
"""Every shape holds one of these: most texts hold none and are done with at once."""


class Redactor:
    """Replaces secrets by a mask. Holds them, so it never shows itself."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        spellings = {
            spelling for secret in secrets for part in _parts(secret) for spelling in _spellings(part)
        }
        # the longest first: a secret that holds another one goes as a whole
        patterns = [_pattern(text) for text in sorted(spellings, key=lambda text: (-len(text), text))]
        self._known = re.compile("|".join(patterns)) if patterns else None

    def __repr__(self) -> str:
        return "Redactor()"

    def text(self, text: str) -> str:
        """`text` without secrets, cut to a bounded length, without what cannot be encoded."""
        text = text[:SEARCHED_CHARS_MAX]
        if self._known is not None:
            text = self._known.sub(MASK, text)
        for shape in _SHAPES if _HINT.search(text) else ():
            text = shape.sub(rf"\g<1>{MASK}", text)
        if len(text) > TEXT_CHARS_MAX:
            text = f"{text[:TEXT_CHARS_MAX]}… ({len(text) - TEXT_CHARS_MAX} more characters)"
        return text.encode("utf-8", "backslashreplace").decode("utf-8")

    def value(self, value: Any, depth: int = 0) -> Any:
        """A log line's value as plain data without secrets; objects become their redacted repr."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return self.text(value)
        if depth < 4 and isinstance(value, dict):
            return {self.text(str(key)): self.value(item, depth + 1) for key, item in value.items()}
        if depth < 4 and isinstance(value, list | tuple | set | frozenset):
            return [self.value(item, depth + 1) for item in value]
        return self.text(repr(value))


def _parts(secret: str) -> Iterator[str]:
    """The secret, and what in it is one by itself: a connection string's key, a service account's."""
    secret = secret.strip()
    if not secret:
        return
    yield secret
    for line in secret.splitlines():
        if len(line.strip()) >= _LINE_CHARS_MIN and not line.startswith("-----") and line.strip() != secret:
            yield line.strip()
    if secret.startswith("{"):
        yield from _parts_of_json(secret)
        return
    for pair in re.split(r"[;&?]", secret):
        name, _, value = pair.partition("=")
        if name.strip().lower() in _FIELDS_OF_PAIRS and value:
            yield value


def _parts_of_json(secret: str) -> Iterator[str]:
    try:
        document = json.loads(secret)
    except ValueError:
        return
    for name in _FIELDS_OF_JSON:
        value = document.get(name)
        if isinstance(value, str):
            yield from _parts(value)


def _spellings(text: str) -> Iterator[str]:
    """As it is, as URLs, XML and headers write it, and as up to two nested reprs or JSON texts show it."""
    written = {text, quote(text, safe=""), quote(text), quote_plus(text), html.escape(text)}
    if len(text) > _WHOLE_WORD_UP_TO:
        written.add(base64.b64encode(text.encode("utf-8", "surrogatepass")).decode().rstrip("="))
    shown = {again for once in written for again in _escaped(once)}
    yield from written | shown | {again for once in shown for again in _escaped(once)}


def _escaped(text: str) -> Iterator[str]:
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    # a repr escapes the quote it is written in, and which one that is depends on the text around
    for in_single in (repr(f'"{text}')[2:-1], repr(f'"{text}'.encode("utf-8", "surrogatepass"))[3:-1]):
        yield in_single
        yield in_single.replace("\\'", "'")


def _pattern(text: str) -> str:
    pattern = re.escape(text)
    return rf"(?<!\w){pattern}(?!\w)" if len(text) <= _WHOLE_WORD_UP_TO else pattern
