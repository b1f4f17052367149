"""How a Gantt chart looks: sizes in pixels, colours, and the style sheet inside the SVG.

A chart is opened alone in a browser or embedded by <img>, where no style sheet of the page reaches
it and no script runs. So it brings its own background and, for dark pages, its own dark colours.
Micro-batches cycle through twelve hues in an order in which neighbours differ; a backward is the
dark variant of its forward's hue. Gradients of weights, where they are computed apart, are all of
one colour: what matters of them is where they fill a gap.
"""

from __future__ import annotations

from colorsys import hls_to_rgb

WIDTH = 1200
NAME_WIDTH = 150
BUSY_WIDTH = 64
MARGIN = 12
PLOT_LEFT = MARGIN + NAME_WIDTH
PLOT_WIDTH = WIDTH - PLOT_LEFT - BUSY_WIDTH - MARGIN
HEAD_HEIGHT = 64
AXIS_HEIGHT = 30
BAR_HEIGHT = 24
LINE_HEIGHT = 7
"""Of an uplink's or downlink's row."""
ROW_GAP = 12
CHARACTER_WIDTH = 6.2
"""Of the bars' labels, on average."""

HUES = 12


def forward_style(micro_batch: int | None) -> str:
    """The class of a forward, and of what it sends."""
    return "x" if micro_batch is None else f"f{micro_batch % HUES}"


def backward_style(micro_batch: int | None) -> str:
    """The class of a backward, and of the gradient it sends."""
    return "x" if micro_batch is None else f"b{micro_batch % HUES}"


def style_sheet() -> str:
    """The content of the SVG's <style>."""
    return "".join((_PLAIN, *_hues(), "@media(prefers-color-scheme:dark){", _DARK, "}"))


_PLAIN = """\
text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#1f2328}
.page{fill:#fff}.head{font-size:15px;font-weight:600}.dim{fill:#59636e}.end{text-anchor:end}
.mid{text-anchor:middle}.small{font-size:10px}.on-f,.on-b{font-size:10px;text-anchor:middle}
.on-f{fill:#10141a}.on-b{fill:#fff}.wait{fill:url(#idle)}.edge{fill:none;stroke:#c4ccd4}
.hatch{stroke:#d5dbe1}.line{fill:#eef1f4}.grid{stroke:#8c959f;stroke-opacity:.3}
.x{fill:#8c959f}.many{fill:#5b7fa6}.reduce{fill:#8250df}.update{fill:#cf222e}
.weight{fill:#bf8700}.exchange{fill:#1b7c83}
"""

_DARK = """\
text{fill:#e6edf3}.page{fill:#0d1117}.dim{fill:#9198a1}.on-f{fill:#10141a}.on-b{fill:#fff}
.edge{stroke:#3d444d}.hatch{stroke:#30363d}.line{fill:#1c2129}.grid{stroke-opacity:.4}
.many{fill:#6f9bcb}.reduce{fill:#a371f7}.update{fill:#ff7b72}
.weight{fill:#d29922}.exchange{fill:#39c5cf}
"""


def _hues() -> list[str]:
    return [
        f".f{i}{{fill:{_colour(i, 0.72, 0.7)}}}.b{i}{{fill:{_colour(i, 0.4, 0.6)}}}"
        for i in range(HUES)
    ]


def _colour(number: int, lightness: float, saturation: float) -> str:
    """The hue of that number as #rrggbb; 150 degrees on, so that neighbours differ."""
    rgb = hls_to_rgb((210 + 150 * number) % 360 / 360, lightness, saturation)
    return "#" + "".join(f"{round(255 * value):02x}" for value in rgb)
