"""Checks that each class name of the package belongs to one class.

    python tools/class_names.py [FOLDER]

Private classes count without their underscore: beside a `Round` there is no `_Round`. Classes
inside classes and functions do not count, nor do those of `events.py`, whose names are the kinds of
events: the others write `events.Plan`. Lists every name that two files define, and then fails.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "p2ptrain"


def classes(file: Path) -> Iterator[ast.ClassDef]:
    """The classes that a file defines at its top level."""
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def shared_names(folder: Path) -> dict[str, list[str]]:
    """By class name, all places that define it, where there are two or more."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in sorted(set(folder.rglob("*.py")) - {folder / "events.py"}):
        for found in classes(file):
            places[found.name.lstrip("_")].append(f"{file}:{found.lineno}")
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def main() -> int:
    """0 where every name belongs to one class."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE)
    folder = parser.parse_args().folder
    shared = shared_names(folder)
    for name, where in shared.items():
        print(f"{name} is the name of {len(where)} classes: {', '.join(where)}")
    return 1 if shared else 0


if __name__ == "__main__":
    sys.exit(main())
