"""Sizes in bytes as people read them."""

from __future__ import annotations

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def size_text(size_bytes: float) -> str:
    """Such as `1.07 GB`, `410 MB` or `18 bytes`."""
    for unit, name in _UNITS:
        if size_bytes >= 0.9995 * unit:
            return f"{float(f'{size_bytes / unit:.3g}'):,.12g} {name}"
    return f"{size_bytes:.0f} bytes"
