"""Which values of loaded settings grant access, and how to keep them out of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, quote_plus

from pydantic import SecretStr

from archiver.settings.keys import CLIENT, MASK, all_keys, is_secret
from archiver.settings.models import Settings
from archiver.settings.rule_text import value_of

_PARTS = re.compile(
    r"(?:AccountKey|SharedAccessSignature|sig)=([^;&]+)|\"private_key(?:_id)?\"\s*:\s*(\"[^\"]+\")"
)


def secret_values(settings: Settings) -> frozenset[str]:
    """Every secret in the settings, and the secret parts of those that have parts."""
    values = [value_of(settings, key.name) for key in all_keys().values() if key.secret]
    texts = [value.get_secret_value() for value in values if isinstance(value, SecretStr)]
    texts += [text for name, text in settings.kafka.client.items() if is_secret((*CLIENT, name))]
    return _with_parts(texts)


def secrets_in_environment(environ: Mapping[str, str]) -> frozenset[str]:
    """The same before settings are loaded, as far as environment variables hold them."""
    names = (name for key in all_keys().values() if key.secret for name in (key.env, key.short))
    return _with_parts([environ[name] for name in names if name and environ.get(name)])


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """The text with each secret masked, also where it stands in a URL, in JSON or in a repr."""
    forms = {form for secret in secrets for form in _forms(secret) if form}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, MASK)
    return text


def _with_parts(texts: list[str]) -> frozenset[str]:
    parts = (match for text in texts for match in _PARTS.finditer(text))
    return frozenset([*texts, *(match[1] or json.loads(match[2]) for match in parts)])


def _forms(secret: str) -> Iterator[str]:
    yield from (secret, quote(secret, safe=""), quote_plus(secret), quote(secret))
    yield from (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1])
