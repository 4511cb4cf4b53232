"""Canonical JSON: one byte string a value, so that its sha256 is an identity.

Sorted keys, no white space, ASCII, integers only: floats have no canonical text across languages.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kgen.runtime.errors import FormatError


def _reject_float(text: str) -> Any:
    raise FormatError(f"the manifest holds the number {text}: only integers are allowed")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        raise FormatError(f"key {next(k for k in keys if keys.count(k) > 1)!r} appears twice in one object")
    return out


def dumps(value: Any) -> bytes:
    """The canonical bytes of `value` (dicts with string keys, lists, strings, integers, booleans, None)."""
    _check(value)
    return _encode(value)


def loads(data: bytes) -> Any:
    """Parse canonical JSON.

    Raises:
        FormatError: `data` is not JSON, holds a float or a duplicate key, or is not in canonical form.
    """
    try:
        value = json.loads(
            data, parse_float=_reject_float, parse_constant=_reject_float, object_pairs_hook=_reject_duplicates
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not valid JSON: {error}") from None
    if _encode(value) != data:
        raise FormatError("the JSON is not in canonical form (sorted keys, no white space, ASCII)")
    return value


def sha256(data: bytes) -> str:
    """Lower-case hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _check(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"object key {key!r} is not a string")
            _check(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check(item)
    elif not (value is None or isinstance(value, (str, int, bool))):
        raise TypeError(f"{value!r} ({type(value).__name__}) has no canonical form")
