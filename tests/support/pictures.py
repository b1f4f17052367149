"""Small pictures that a test makes: circles and squares in some colour on a darker ground."""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw


def picture(
    seed: int,
    shape: str = "circle",
    kind: str = "JPEG",
    size: tuple[int, int] = (80, 60),
    **more: object,
) -> bytes:
    """One as bytes; `more` is for Pillow's save."""
    draw = random.Random(seed)
    image = Image.new("RGB", size, tuple(draw.randrange(20, 110) for _ in range(3)))
    side = draw.randrange(min(size) // 2, min(size))
    x, y = (draw.randrange(space - side + 1) for space in size)
    paint = ImageDraw.Draw(image)
    form = paint.ellipse if shape == "circle" else paint.rectangle
    form((x, y, x + side, y + side), fill=tuple(draw.randrange(170, 256) for _ in range(3)))
    blob = BytesIO()
    image.save(blob, kind, **more)
    return blob.getvalue()


def fill(folder: Path, count: int, shapes: tuple[str, ...] = ("circle", "square")) -> None:
    """So many of each shape, in a folder of its name."""
    for shape in shapes:
        (folder / shape).mkdir(parents=True, exist_ok=True)
        for seed in range(count):
            (folder / shape / f"{seed}.jpg").write_bytes(picture(seed, shape, quality=95))
