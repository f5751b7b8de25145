"""Torch's async tensor-parallel ops, run by ours (docs/interop.md); this module imports Torch."""

from fluxgen.runtime.interop import Matches, install, matches, uninstall

__all__ = ["Matches", "install", "matches", "uninstall"]
