"""What tests on emulated households ask for."""

from __future__ import annotations

import pytest

from tools.testbed import Testbed, TestbedError


@pytest.fixture(scope="session")
def emulation() -> None:
    """Skip where namespaces can be made, but no control groups (some containers)."""
    try:
        with Testbed.of_shares((1.0,)):
            pass
    except (OSError, TestbedError) as error:
        pytest.skip(f"NOT TESTED: no emulated household can be made here: {error}")
