"""Refuse to load code that another user could have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fluxgen.core.errors import StoreError


def check(path: Path, *, directory: bool) -> None:
    """Require a real file or directory of this user or root that no one else can write.

    Root's are as good as one's own, so that a store baked into an image can be read; whoever is
    root could replace this process's libraries anyway.

    Raises:
        StoreError: says which mode or owner was found, and the command that mends it.
        FileNotFoundError: there is nothing at ``path``.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(
            f"store: cannot look at {path}: {error}. Set FLUXGEN_STORE to a directory of yours."
        ) from error
    kind = stat.S_ISDIR(found.st_mode) if directory else stat.S_ISREG(found.st_mode)
    if not kind:
        raise StoreError(
            f"store: expected a {'directory' if directory else 'plain file'} at {path}; found "
            f"{stat.filemode(found.st_mode)}. Remove it, or set FLUXGEN_STORE to another place."
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise StoreError(
            f"store: expected {path} to be owned by uid {os.geteuid()} or root; found uid "
            f"{found.st_uid}, who could make this process run any code. Set FLUXGEN_STORE to a "
            f"directory of yours."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(
            f"store: expected {path} to be writable by its owner alone; found mode "
            f"{stat.S_IMODE(found.st_mode):04o}, so others can make this process run any code. "
            f"If you trust what is in it, run: chmod -R go-w '{path}'"
        )
