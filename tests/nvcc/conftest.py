"""What all tests that compile need."""

from __future__ import annotations

import pytest

from fluxgen.compiler.toolchain import Toolchain, find
from fluxgen.core.errors import ToolchainError


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    """nvcc and CUTLASS, or a skip that says what is missing."""
    try:
        return find()
    except ToolchainError as error:
        pytest.skip(f"no toolchain: {error}")
