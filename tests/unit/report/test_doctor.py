"""What `fluxgen doctor` says of the GPUs."""

from __future__ import annotations

import pytest

from fluxgen.core.topology import GPUS
from fluxgen.report import doctor
from fluxgen.runtime.device import Device


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([0, 0], None),
        ([0, 1], "--link pcie2"),
        ([0, 0, 1, 1], "on 2 sockets"),
        ([0, 1, 0, 1], None),
    ],
)
def test_sockets_are_told_where_a_ring_can_follow_them(monkeypatch, nodes, words):
    found = tuple(Device("NVIDIA L20", GPUS["l20"], "13.0", node) for node in nodes)
    monkeypatch.setattr(doctor, "devices", lambda: found)
    (check,) = [c for c in doctor.examine() if c.name == "gpu"]
    assert "NVIDIA L20 (sm89, 92 SMs)" in check.detail
    assert ("socket" in check.detail) == (words is not None)
    assert (words or "") in check.detail
