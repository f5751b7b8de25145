"""The ops where no GPU reaches another's memory: exact, late ranks, graphs, in the host's memory.

In a module of its own, so that the pools of ``test_ops`` are gone: with their fourteen processes
the GPU has no room for more contexts of 32 connections.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fluxgen.runtime.memory.hosted import SharedFile  # noqa: E402
from fluxgen.runtime.session.groups import state_of  # noqa: E402
from tests.gpu.ranks import Environment, database, hosted, pool, shapes  # noqa: E402
from tests.gpu.test_ops import _forward, _graphs, _late  # noqa: E402


def _in_the_host(groups, rank):
    del rank
    file, _ = state_of(groups["all"]).fused.workspace._keep
    assert isinstance(file, SharedFile)


@pytest.mark.parametrize("world", [2, 4])
def test_by_way_of_the_hosts_memory(world):
    """As where no GPU reaches another's memory: the same, with the workspaces in the host's."""
    environment = Environment(database(hosted(shapes(world))), FLUXGEN_P2P_DISABLE="1")
    ranks = pool(world, environment=environment)
    try:
        assert ranks(_forward, "all") == [world] * world
        ranks(_late, 8)
        ranks(_graphs, 12)
        ranks(_in_the_host)
    finally:
        ranks.close()
