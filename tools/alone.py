"""Runs again, one after the other, the few tests with devices that failed beside others.

    .venv/bin/python -m tools.alone        # after a `make test` that has failed

Three processes share this machine's cores while all tests run, so that a device may seem to hang.
What fails alone too is a failure. Unit tests have no devices: they get no second run, nor does
anything where more than a few tests fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")

MOST = 3

WITH_DEVICES = ("tests/integration/", "tests/simulation/", "tests/system/")


def why_not(failed: Collection[str]) -> str:
    """Why these tests are not run again; "" where they are."""
    others = [name for name in failed if not name.startswith(WITH_DEVICES)]
    if not failed:
        return "no test has failed: what failed came before or after the tests"
    if others:
        return f"not run again, for it has no devices: {others[0]}"
    if len(failed) > MOST:
        return f"not run again: {len(failed)} tests have failed, more than {MOST}"
    return ""


def main() -> int:
    failed: dict[str, bool] = json.loads(LAST_FAILED.read_text()) if LAST_FAILED.exists() else {}
    refused = why_not(failed)
    if refused:
        print(refused)
        return 1
    for name in failed:
        print(f"FAILED BESIDE OTHERS, now alone: {name}", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", *failed], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
