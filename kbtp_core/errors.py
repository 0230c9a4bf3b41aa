"""Errors that reach a user. Each text names the thing, the value and the way out."""

from __future__ import annotations


class KbtpError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(KbtpError):
    """A setting is unknown or has no valid value."""


class Malformed(KbtpError):
    """Remote: octets that are no message of the protocol (status MALFORMED)."""


class SessionRefused(KbtpError):
    """Remote: the target answered HELLO with a status other than OK."""


class SessionClosed(KbtpError):
    """The session ended; what was outstanding has failed."""


class GeometryMismatch(KbtpError):
    """Two engines hold KV in different shapes; the text names the field and both values."""


class DeadlineExceeded(KbtpError):
    """An absolute deadline passed; the memory involved has been fenced first."""
