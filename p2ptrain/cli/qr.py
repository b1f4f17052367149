"""QR codes on a terminal, so that a phone or a tablet need not type."""

from __future__ import annotations

import io


def terminal_code(text: str) -> str:
    """`text` as a QR code in block characters, several lines."""
    import segno

    out = io.StringIO()
    segno.make(text, micro=False).terminal(out, border=2, compact=True)
    return out.getvalue().rstrip("\n")
