"""A group as users give it: a process group, its name, or a dim of a device mesh."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fluxgen.core.errors import UsageError

__all__ = ["Group", "group_of", "member_of", "rank_of", "resolve"]

Group: TypeAlias = "dist.ProcessGroup | str | DeviceMesh | tuple[DeviceMesh, int | str]"
"""A process group or its ``group_name``; a device mesh of one dim, or a mesh and a dim of it."""


def group_of(group: Group) -> tuple[str, int]:
    """The name and the number of ranks of a group this process belongs to.

    Raises:
        UsageError: not a group, or not one of this process.
    """
    if isinstance(group, str):
        return group, _size(group)
    # One by one: of both at once torch.compile says no, for a mesh.
    if isinstance(group, DeviceMesh) or isinstance(group, tuple):  # noqa: SIM101
        of_mesh = _mesh_group(*_of_mesh(group))
        return of_mesh, _size(of_mesh)
    name = getattr(group, "group_name", None)
    if name is None:
        raise UsageError(
            "group: expected a process group that this rank belongs to, its name, a DeviceMesh of "
            f"one dim, or (DeviceMesh, dim); found {group!r}"
        )
    return name, group.size()


def _of_mesh(group: Any) -> tuple[DeviceMesh, int]:
    """The mesh and the dim that a group is given by.

    Raises:
        UsageError: not a mesh and a dim of it.
    """
    mesh, dim = (group, 0) if isinstance(group, DeviceMesh) else (*group, None, None)[:2]
    if not isinstance(mesh, DeviceMesh) or (group is not mesh and len(group) != 2):
        raise UsageError(f"group: expected (DeviceMesh, dim), where it is a tuple; found {group!r}")
    names = mesh.mesh_dim_names or ()
    if group is mesh and mesh.ndim != 1:
        raise UsageError(
            f"group: expected a DeviceMesh of one dim; found one of {mesh.ndim}"
            f"{f', {names}' if names else ''}. Pass (mesh, dim), or mesh[name]"
        )
    if isinstance(dim, str) and dim in names:
        dim = names.index(dim)
    if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim < mesh.ndim:
        raise UsageError(
            f"group: expected a dim of the DeviceMesh, 0 to {mesh.ndim - 1}"
            f"{f' or one of {names}' if names else ''}; found {dim!r}"
        )
    return mesh, dim


def _mesh_group(mesh: DeviceMesh, dim: int) -> str:
    if torch.compiler.is_compiling():  # as torch's functional collectives do, as a constant
        return mesh._dim_group_names[dim]  # type: ignore[no-any-return]
    try:
        return str(mesh.get_group(dim).group_name)
    except (RuntimeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"group: expected a DeviceMesh that this rank belongs to; found {mesh!r}: {error}"
        ) from error


def member_of(group: Group) -> tuple[str, int, int]:
    """The name and size of a group, and this process's rank inside it."""
    name, tp = group_of(group)
    return name, tp, int(resolve(name).rank())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _size(name: str) -> int:
    return int(resolve(name).size())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def rank_of(name: str) -> int:
    """This process's rank in the group of a name, a constant while torch.compile traces."""
    return int(resolve(name).rank())


def resolve(name: str) -> dist.ProcessGroup:
    """The process group of a name.

    Raises:
        UsageError: there is none.
    """
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError) as error:
        raise UsageError(f"group: no process group is named {name!r}: {error}") from error
