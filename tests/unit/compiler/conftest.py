"""The ``fake`` fixture for all tests of this directory."""

from __future__ import annotations

from fakecuda import fake

__all__ = ["fake"]
