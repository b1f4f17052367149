"""Your own pictures, a small network from scratch: what is on them?

    p2ptrain page --lan --photos ~/fruit           # then add pictures with a phone
    p2ptrain train examples/photos.py -o folder=~/fruit --local
    p2ptrain train examples/photos.py -o folder=~/fruit --wait-for 3

The folder is laid out as torchvision's ImageFolder reads it: fruit/apple/1.jpg, fruit/pear/2.jpg.
A fifth of each label's pictures is kept for the evaluation, always the same ones. After each epoch
the page shows those whose label the network doubts most; a tap corrects a label, and the next
`train` uses that: this one keeps the pictures in memory as it has found them.

Needs Pillow: pip install pillow (it comes with torchvision). From scratch some fifty pictures a
label tell apart what differs in colour or shape; fine differences need more, or a trained network.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import p2ptrain
from p2ptrain.photos import LeastCertain

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
FEWEST = 5  # of a label


def job(
    folder: str = "photos", size: int = 64, width: int = 16, epochs: int = 30, lr: float = 3e-3
) -> p2ptrain.Job:
    """`size`: pixels of a side; `width`: channels of the first layer."""
    train, test = load(folder, size)
    torch.manual_seed(0)
    batch_size = min(16, len(train))
    loader = DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=True)
    model = network(width, len(train.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    doubts = LeastCertain(test, folder)
    return p2ptrain.Job(
        model=model,
        data=loader,
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, epochs * len(loader)),
        epochs=epochs,
        clip_grad_norm=1.0,
        eval_data=DataLoader(test, batch_size=batch_size),
        metrics={
            "accuracy": lambda output, target: (output.argmax(1) == target).float().mean(),
            "sure": doubts,
        },
        callbacks=[doubts],
    )


def network(width: int, classes: int) -> nn.Sequential:
    """(n, 3, size, size) -> (n, classes)."""

    def half(entering: int, leaving: int) -> list[nn.Module]:
        return [
            nn.Conv2d(entering, leaving, 3, padding=1, bias=False),
            nn.GroupNorm(4, leaving),  # of each picture alone: no batch is too small
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]

    return nn.Sequential(
        *half(3, width),
        *half(width, 2 * width),
        *half(2 * width, 4 * width),
        *half(4 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),  # wherever it is in the picture
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pictures in memory, with the names that LeastCertain asks for.

    Attributes:
        classes: the labels, in order.
        samples: each picture's file and the number of its label.
    """

    def __init__(
        self, classes: list[str], samples: list[tuple[Path, int]], size: int, varies: bool
    ) -> None:
        """`varies`: each look at a picture is a little different."""
        self.classes = classes
        self.samples = samples
        self._varies = varies
        self._pixels = torch.stack([read(path, size) for path, _ in samples])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels = self._pixels[index] / 127.5 - 1
        if self._varies:
            pixels = varied(pixels)
        return pixels, torch.tensor(self.samples[index][1])


def load(folder: str, size: int) -> tuple[Pictures, Pictures]:
    """Pictures to train with and to evaluate with."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise p2ptrain.UserError(
            f"there is no folder {root}: add pictures with `p2ptrain page --lan --photos {root}`, "
            "or say where they are with -o folder=DIR"
        )
    labels = sorted(place for place in root.iterdir() if place.is_dir() and place.name[0] != ".")
    files = {label.name: pictures(label) for label in labels}
    few = [f"{name} has {len(found)}" for name, found in files.items() if len(found) < FEWEST]
    if len(files) < 2 or few:
        found = ", ".join(few) or f"there is {len(files) or 'no'} label"
        raise p2ptrain.UserError(
            f"too few pictures in {root}: at least two labels with {FEWEST} pictures each are "
            f"needed, but {found}"
        )
    train, test = [], []
    for number, found in enumerate(files.values()):
        kept = len(found) // 5
        test += [(path, number) for path in found[:kept]]
        train += [(path, number) for path in found[kept:]]
    classes = list(files)
    return Pictures(classes, train, size, True), Pictures(classes, test, size, False)


def varied(pixels: Tensor) -> Tensor:
    """(3, size, size), perhaps mirrored, moved by up to an eighth, lighter or darker."""
    size = pixels.shape[1]
    most = size // 8
    down, right, mirror = (int(torch.randint(most_of, ())) for most_of in (2 * most, 2 * most, 2))
    light = 0.7 + 0.6 * torch.rand(())
    wide = nn.functional.pad(pixels * light, (most,) * 4, mode="reflect")
    moved = wide[:, down : down + size, right : right + size]
    return moved.flip(2) if mirror else moved


def pictures(label: Path) -> list[Path]:
    """In an order by their names alone: what is evaluated stays so when others come."""

    def shuffled(path: Path) -> bytes:
        return hashlib.blake2b(path.name.encode()).digest()

    return sorted((p for p in label.iterdir() if p.suffix.lower() in SUFFIXES), key=shuffled)


def read(path: Path, size: int) -> Tensor:
    """The middle of a picture: (3, size, size), bytes."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise p2ptrain.UserError("pictures are read with Pillow: pip install pillow") from None
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except OSError as error:
        raise p2ptrain.UserError(f"{path} cannot be read, remove it: {error}") from error
    fitted = ImageOps.fit(upright, (size, size), Image.Resampling.LANCZOS)
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return pixels.view(size, size, 3).permute(2, 0, 1).contiguous()
