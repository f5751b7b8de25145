"""What `fluxgen doctor` says of the GPUs."""

from __future__ import annotations

import pytest

from fluxgen.core.topology import GPUS
from fluxgen.machine.device import Device
from fluxgen.report import doctor


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
    found = tuple(Device("NVIDIA L20", GPUS["l20"], "13.0", numa=node) for node in nodes)
    monkeypatch.setattr(doctor, "devices", lambda: found)
    (check,) = [c for c in doctor.examine() if c.name == "gpu"]
    assert "NVIDIA L20 (sm89, 92 SMs)" in check.detail
    assert ("socket" in check.detail) == (words is not None)
    assert (words or "") in check.detail


@pytest.mark.parametrize(
    ("linked", "words"),
    [(True, "; joined by NVLink"), (False, "; not all joined by NVLink; on 2 sockets"), (None, "")],
)
def test_nvlink_is_told_where_it_is_known(monkeypatch, linked, words):
    found = tuple(Device("NVIDIA A40", GPUS["a40"], "13.0", f"gpu{i}", i) for i in range(2))
    monkeypatch.setattr(doctor, "devices", lambda: found)
    monkeypatch.setattr(doctor, "nvlinked", lambda a: {("gpu0", "gpu1"): linked}[tuple(a)])
    (check,) = [c for c in doctor.examine() if c.name == "gpu"]
    assert words in check.detail
    assert ("NVLink" in check.detail) == (linked is not None)
