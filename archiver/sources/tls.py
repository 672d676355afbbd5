"""TLS of the push listener: certificate, key, and the authority that senders' certificates must come from."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from archiver.errors import StartError

if TYPE_CHECKING:
    from archiver.settings.models import Grpc


def server_credentials(settings: Grpc) -> grpc.ServerCredentials | None:
    """None without `grpc.tls_certificate`; mutual TLS with `grpc.tls_client_ca`.

    Raises `StartError` where a file cannot be read or certificate and key do not belong together.
    """
    if settings.tls_certificate is None and settings.tls_key is None:
        if settings.tls_client_ca is not None:
            raise StartError("grpc.tls_client_ca needs grpc.tls_certificate and grpc.tls_key beside it")
        return None
    if settings.tls_certificate is None or settings.tls_key is None:
        raise StartError("grpc.tls_certificate and grpc.tls_key must be set together")
    client_ca = None if settings.tls_client_ca is None else Path(settings.tls_client_ca)
    files = _TlsFiles(Path(settings.tls_certificate), Path(settings.tls_key), client_ca)
    return grpc.dynamic_ssl_server_credentials(
        files.load(),
        files.changed,  # type: ignore[arg-type]  # None is allowed: nothing has changed
        require_client_authentication=client_ca is not None,
    )


class _TlsFiles:
    """The files as last read. A renewed certificate is served from the next connection on."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._seen: tuple[int, ...] = ()

    def load(self) -> grpc.ServerCertificateConfiguration:
        seen = self._stamps()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password(self._key))
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
            configuration = grpc.ssl_server_certificate_configuration(
                [(self._key.read_bytes(), self._certificate.read_bytes())],
                root_certificates=None if self._client_ca is None else self._client_ca.read_bytes(),
            )
        except (OSError, ssl.SSLError) as error:
            raise StartError(
                f"TLS of the gRPC listener: grpc.tls_certificate={self._certificate}, "
                f"grpc.tls_key={self._key}, grpc.tls_client_ca={self._client_ca}: {error}"
            ) from error
        self._seen = seen
        return configuration

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by the server for each connection. Half-written files keep the certificate that works."""
        try:
            return self.load() if self._stamps() != self._seen else None
        except (OSError, StartError):
            return None

    def _stamps(self) -> tuple[int, ...]:
        files = (self._certificate, self._key, self._client_ca)
        try:
            return tuple(path.stat().st_mtime_ns for path in files if path is not None)
        except OSError as error:
            raise StartError(f"a TLS file of the gRPC listener cannot be read: {error}") from error


def _no_password(key: Path) -> Callable[[], str]:
    """Instead of a question on the terminal, which a daemon would wait for for ever."""

    def refuse() -> str:
        raise StartError(f"grpc.tls_key={key} is encrypted: give an unencrypted key file")

    return refuse
