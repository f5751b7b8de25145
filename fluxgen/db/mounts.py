"""Is a path on a network file system? SQLite's locks are not to be trusted there."""

from __future__ import annotations

import os
import re
from pathlib import Path

# fmt: off
NETWORK_TYPES = frozenset((
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "9p", "afs", "ceph",
    "lustre", "gpfs", "beegfs", "glusterfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph",
    "fuse.beegfs", "fuse.s3fs", "fuse.gcsfuse",
))
# fmt: on
"""File-system types, as the kernel names them, whose files several hosts may share."""

_OCTAL = re.compile(r"\\([0-7]{3})")


def network_filesystem(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the network file system that holds ``path``, or None.

    ``path`` need not exist. Without a readable ``mounts`` table nothing is known: None.
    """
    try:
        table = mounts.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    target = os.path.realpath(path)
    best, kind = "", ""
    for line in table.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        # The last of equal mount points hides those before it.
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind if kind in NETWORK_TYPES else None
