"""The public port's certificate and key. Read at start: a renewed certificate is served after a restart."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, Self

import msgspec

from streams.bus.errors import SettingsError

CERT, KEY = "GATEWAY_TLS_CERT", "GATEWAY_TLS_KEY"


class Tls(msgspec.Struct, frozen=True):
    """`cert`: the certificate, and behind it those up to the root, PEM. `key`: its private key, PEM."""

    cert: Path
    key: Path

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self | None:
        """None: plain HTTP. Raises SettingsError."""
        cert, key = env.get(CERT, ""), env.get(KEY, "")
        if not cert and not key:
            return None
        if not (cert and key):
            given, lacking = (CERT, KEY) if cert else (KEY, CERT)
            raise SettingsError(f"{lacking} is missing while {given} is given: give both, or neither for plain HTTP")
        tls = cls(Path(cert), Path(key))
        tls.context()
        return tls

    def context(self) -> ssl.SSLContext:
        """Raises SettingsError."""
        self._read(CERT, self.cert, "CERTIFICATE-----", "a certificate")
        self._read(KEY, self.key, "PRIVATE KEY-----", "a private key")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.cert, self.key, _no_passphrase)
        except SettingsError as error:
            raise SettingsError(f"{KEY}={self.key} {error}") from None
        except ssl.SSLError as error:
            why = (error.reason or "cannot be read").replace("_", " ").lower()
            raise SettingsError(
                f"{KEY}={self.key} and {CERT}={self.cert}: {why}: give a certificate in PEM and the key it was made for"
            ) from None
        return context

    @staticmethod
    def _read(name: str, file: Path, mark: str, what: str) -> None:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise SettingsError(f"{name}={file} cannot be read: {why}: name {what} in PEM") from None
        if mark not in text:
            raise SettingsError(f"{name}={file} holds no {mark.strip('-').lower()}: name {what} in PEM")


def _no_passphrase() -> NoReturn:
    """Asked for by OpenSSL, which would else ask the terminal."""
    raise SettingsError("is locked with a passphrase: give one that is not")
