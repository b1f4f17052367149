"""The help of every command is there at once: nothing heavy is loaded for it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", [(), ("train",), ("join",), ("plan",)])
def test_help_loads_no_heavy_library(command: tuple[str, ...]) -> None:
    code = (
        "import sys; from p2ptrain.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'aiohttp'} & sys.modules.keys()\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    argv = [sys.executable, "-c", code, *command, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout
