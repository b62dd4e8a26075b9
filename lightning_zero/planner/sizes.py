"""Bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(value: str | float) -> int:
    """Read a number of bytes, such as ``"80GB"`` (10**9), ``"80GiB"`` (2**30) or ``80e9``.

    Raises:
        ValueError: If it is no positive size.
    """
    if isinstance(value, str):
        text = value.strip().lower().replace("_", "")
        match = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)\s*([kmgt]?)(i?)b?", text)
        if match is None or (match[3] and not match[2]):
            raise ValueError(f"{value!r} is not a size: write it as 80GB, 24GiB or 80e9.")
        try:
            number = float(match[1])
        except ValueError as error:
            raise ValueError(f"{value!r} is not a size: write it as 80GB.") from error
        value = number * (_BINARY if match[3] else _UNITS)[match[2]]
    if not value > 0 or value == float("inf"):
        raise ValueError(f"{value!r} is not a size: it has to be more than 0 bytes.")
    return int(value)
