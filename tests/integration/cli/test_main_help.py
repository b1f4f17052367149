"""The help of every command is there at once: nothing heavy is loaded for it."""

from __future__ import annotations

import subprocess
import sys

_COMMANDS = ("", "train", "join", "page", "plan")


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys; from p2ptrain.cli.main import main\n"
        "for command in sys.argv[1:]:\n"
        "    try: main([*command.split(), '--help'])\n"
        "    except SystemExit: pass\n"
        "    heavy = {'torch', 'numpy', 'aiohttp', 'cryptography', 'structlog'} & {*sys.modules}\n"
        "    if heavy: sys.exit(f'{command} loaded {heavy}')\n"
    )
    argv = [sys.executable, "-c", code, *_COMMANDS]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage") >= len(_COMMANDS)
