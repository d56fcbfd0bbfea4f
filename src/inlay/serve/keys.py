"""Who may ask: keys from a file or the environment, kept as digests and compared in constant time.

    keys.txt        # one key per line
                    7f0c…                    may ask
                    admin b91e…              may ask, load and delete

A key comes as `Authorization: Bearer KEY`, as `X-API-Key: KEY`, or as the password of `Authorization: Basic`, which is
what a browser asks for when the page is opened. Keys are in no log and no answer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inlay.errors import ConfigError

Role = Literal["user", "admin"]
USERS, ADMINS = "INLAY_SERVE_KEYS", "INLAY_SERVE_ADMIN_KEYS"
SHORTEST = 16


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, repr=False)
class Keys:
    """Digests of the keys; none at all: everybody may ask, nobody may load or delete."""

    users: tuple[bytes, ...] = ()
    admins: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, users: Iterable[str] = (), admins: Iterable[str] = ()) -> Keys:
        users, admins = list(users), list(admins)
        short = sum(len(key) < SHORTEST for key in (*users, *admins))
        if short:
            raise ConfigError(
                f"{short} of the keys are shorter than {SHORTEST} characters, which can be guessed. "
                f"Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        return cls(tuple(map(_digest, users)), tuple(map(_digest, admins)))

    @classmethod
    def read(cls, file: Path | None, environment: Mapping[str, str] = os.environ) -> Keys:
        """The keys of a file and of the environment."""
        users, admins = (_listed(environment.get(name, "")) for name in (USERS, ADMINS))
        if file is not None:
            try:
                lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the keys cannot be read: {type(error).__name__} at {file}") from None
            for line in lines:
                if line and not line.startswith("#"):
                    role, _, key = line.rpartition(" ")
                    if role.strip() not in ("", "admin"):
                        raise ConfigError(f"{file}: a line is a key, or 'admin' and a key; one has more words.")
                    (admins if role else users).append(key)
            if not users and not admins:
                raise ConfigError(f"{file} holds no key. Write one per line.")
        return cls.of(users, admins)

    def __bool__(self) -> bool:
        return bool(self.users or self.admins)

    def role_of(self, key: str | None) -> Role | None:
        """What a key allows. Every key is compared, whether an earlier one was right or not."""
        given = _digest(key or "")
        user = admin = False
        for known in self.users:
            user |= hmac.compare_digest(known, given)
        for known in self.admins:
            admin |= hmac.compare_digest(known, given)
        return "admin" if admin else "user" if user else None


def _listed(text: str) -> list[str]:
    return [key for part in text.split(",") if (key := part.strip())]


def key_in(headers: Mapping[str, str]) -> str | None:
    """The key that a request brings."""
    way, _, rest = headers.get("authorization", "").partition(" ")
    if way.lower() == "bearer":
        return rest.strip()
    if way.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode("utf-8").partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return None
    return headers.get("x-api-key")


def client_of(key: str | None, address: str) -> str:
    """Whom rows are counted for: who has the same key, or the same address, is one client."""
    return f"key {_digest(key).hex()[:12]}" if key else f"address {address}"
