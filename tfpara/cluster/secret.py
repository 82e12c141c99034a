"""The secret by which the processes of a run know each other from strangers.

It comes from the launcher, or from the user, in TFPARA_SECRET or in the file that
TFPARA_SECRET_FILE names, and is never sent: what is sent is signed with keys made of it. Only the
standard library is imported.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Mapping

VARIABLE, FILE_VARIABLE = "TFPARA_SECRET", "TFPARA_SECRET_FILE"
_SHORTEST, _LONGEST = 16, 4096  # bytes
_MAKE_ONE = "(umask 077; python -c 'import secrets; print(secrets.token_hex())' > FILE)"
_log = logging.getLogger(__name__)


class SecretError(ValueError):
    """The secret cannot be read, or is none. The message names the variable and the fix."""


def read(environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret that the environment gives, without white space at its ends.

    Returns:
        The secret; empty if there is none, so that anyone may take part.

    Raises:
        SecretError: both variables are set, the file cannot be read, or the secret is too short
            to be one, or too long.
    """
    given, path = environ.get(VARIABLE, ""), environ.get(FILE_VARIABLE, "")
    if given and path:
        raise SecretError(f"{VARIABLE} and {FILE_VARIABLE}={path!r} are both set. Unset one.")
    if not given and not path:
        return b""
    source = f"{FILE_VARIABLE}={path!r}" if path else VARIABLE
    found = (_contents(path) if path else os.fsencode(given)).strip()
    if not _SHORTEST <= len(found) <= _LONGEST:
        raise SecretError(
            f"{source} has {len(found)} bytes, but a secret has from {_SHORTEST} to {_LONGEST}. "
            f"Make one by {_MAKE_ONE}."
        )
    return found


def for_start(environ: Mapping[str, str]) -> dict[str, str]:
    """What a launcher adds to the environment of its workers: a fresh secret, unless one is given.

    Raises:
        SecretError: as by `read`.
    """
    return {} if read(environ) else {VARIABLE: secrets.token_hex(32)}


def derive(secret: bytes, *purpose: bytes) -> bytes:
    """A key of 32 bytes for one purpose, from which the secret cannot be found."""
    text = b"".join(len(part).to_bytes(4, "big") + part for part in purpose)
    return hmac.digest(secret, b"tfpara" + text, "sha256")


def warn_without(secret: bytes, addresses: Iterable[str]) -> None:
    """Says in one line that there is no secret, where addresses "host:port" lead to a network."""
    if not secret and not all(is_loopback(address) for address in addresses):
        _log.warning(
            "tfpara: the processes' meeting is not authenticated: whoever reaches its port can "
            f"take part in it. Set {FILE_VARIABLE} or {VARIABLE} to the same for all; "
            "see docs/security.md."
        )


def _contents(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                _log.warning("tfpara: everyone on this machine may read %s: chmod 600 it.", path)
            return file.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        raise SecretError(
            f"{FILE_VARIABLE}={path!r} cannot be read ({error}). Name a file that holds the "
            f"secret: {_MAKE_ONE}."
        ) from None


def is_loopback(address: str) -> bool:
    """Whether an address "host:port" leads to this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
