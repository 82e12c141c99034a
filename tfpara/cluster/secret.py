"""The secret by which the processes of a run tell each other from strangers.

The launcher or the user sets it in TFPARA_SECRET, or in the file that TFPARA_SECRET_FILE names. It
is never sent: messages are signed with keys derived from it.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Mapping

from tfpara.cluster import ports

VARIABLE, FILE_VARIABLE = "TFPARA_SECRET", "TFPARA_SECRET_FILE"
_SHORTEST, _LONGEST = 16, 4096  # limits of a secret's length in bytes
MAKE_ONE = "(umask 077; python -c 'import secrets; print(secrets.token_hex())' > FILE)"
_log = logging.getLogger(__name__)


class SecretError(ValueError):
    """The secret cannot be read, or is not valid. The message names the variable and the fix."""


def read(environ: Mapping[str, str] = os.environ) -> bytes:
    """Returns the secret of the environment; empty if there is none, so that anyone may take part.

    Raises:
        SecretError: both variables are set, the file cannot be read, or the secret is too short or
            too long.
    """
    given, path = environ.get(VARIABLE, ""), environ.get(FILE_VARIABLE, "")
    if given and path:
        raise SecretError(f"{VARIABLE} and {FILE_VARIABLE}={path!r} are both set. Unset one.")
    if not given and not path:
        return b""
    source = f"{FILE_VARIABLE}={path!r}" if path else VARIABLE
    secret = (_contents(path) if path else os.fsencode(given)).strip()
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise SecretError(
            f"{source} has {len(secret)} bytes, but a secret has from {_SHORTEST} to {_LONGEST}. "
            f"Make one by {MAKE_ONE}."
        )
    return secret


def for_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns TFPARA_SECRET with a new secret, or {} if `environ` has one; errors as for `read`."""
    return {} if read(environ) else {VARIABLE: secrets.token_hex(32)}


def derive(secret: bytes, *purpose: bytes) -> bytes:
    """Derives a key of 32 bytes for one purpose; the secret cannot be computed from it."""
    text = b"".join(len(part).to_bytes(4, "big") + part for part in purpose)
    return hmac.digest(secret, b"tfpara" + text, "sha256")


def warn_without(secret: bytes, addresses: Iterable[str]) -> None:
    """Warns if there is no secret and other machines can reach one of the "host:port" addresses."""
    if not secret and not all(ports.is_loopback(ports.split(each)[0]) for each in addresses):
        _log.warning(
            "tfpara: the processes' meeting is not authenticated: whoever reaches its port can "
            f"take part in it. Set {FILE_VARIABLE} or {VARIABLE} to the same for all."
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
            f"secret: {MAKE_ONE}."
        ) from None
