"""How the GPUs of a group reach each other."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fluxgen.core.topology import GPUS, LinkKind
from fluxgen.machine.wiring import Wiring, islands, nvlinked

# Pairs of GPUs with bridges: 0 and 1, 2 and 3. GPU 9 is not shown.
FAKE_NVML = """
#include <stdlib.h>
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** handle) {
  *handle = (void*)(long)(atoi(address) + 1);
  return atoi(address) == 9 ? 6 : 0;
}
#ifndef OLD
int nvmlDeviceGetP2PStatus(void* one, void* other, int index, int* status) {
  long const a = (long)one - 1, b = (long)other - 1;
  *status = index == 2 && (SWITCH || a / 2 == b / 2) ? 0 : 5;
  return STATUS;
}
#endif
"""


def nvml(tmp_path, **macros):
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(FAKE_NVML)
    values = {"INIT": 0, "SWITCH": 0, "STATUS": 0} | macros
    flags = [f"-D{name}={value}" for name, value in values.items()]
    gcc = shutil.which("gcc")
    subprocess.run([gcc, "-shared", "-fPIC", *flags, source, "-o", library], check=True)
    return str(library)


@pytest.mark.parametrize(
    ("gpus", "want"),
    [("01", True), ("10", True), ("23", True), ("12", False), ("0123", False), ("013", False)],
)
def test_nvlink_joins_every_two_or_it_does_not(tmp_path, gpus, want):
    assert nvlinked(gpus, nvml(tmp_path)) is want


def test_nvlink_through_switches(tmp_path):
    assert nvlinked("01234567", nvml(tmp_path, SWITCH=1)) is True


@pytest.mark.parametrize("macros", [{"INIT": 9}, {"STATUS": 3}, {"OLD": 1}])
def test_where_nvml_does_not_know_nobody_does(tmp_path, macros):
    assert nvlinked("01", nvml(tmp_path, **macros)) is None


@pytest.mark.parametrize("gpus", ["", "0", "00", "0110", "09"])
def test_of_gpus_that_are_shared_or_not_shown_nobody_knows(tmp_path, gpus):
    assert nvlinked(gpus, nvml(tmp_path)) is None


def test_no_nvml_is_no_answer():
    assert nvlinked("01", "libno-such-nvml.so") is None


@pytest.mark.parametrize(
    ("wiring", "gpu", "key"),
    [
        (Wiring(), "h100-pcie", "h100-pcie-nvlink-tp4"),  # as before anybody asked
        (Wiring(nvlink=True), "h100-pcie", "h100-pcie-nvlink-tp4"),
        (Wiring(nvlink=False), "h100-pcie", "h100-pcie-pcie-tp4"),
        (Wiring(nvlink=False, islands=2), "h100-pcie", "h100-pcie-pcie2-tp4"),
        (Wiring(nvlink=True, islands=2), "h100-pcie", "h100-pcie-nvlink-tp4"),
        (Wiring(islands=2), "l20", "l20-pcie2-tp4"),
        (Wiring(peers=False, nvlink=True, islands=2), "h100-pcie", "h100-pcie-host-tp4"),
    ],
)
def test_records_are_looked_up_for_the_link_that_there_is(wiring, gpu, key):
    topology = wiring.topology(GPUS[gpu], 4)
    assert topology.key == key
    assert topology.link in LinkKind


@pytest.mark.parametrize(
    ("nodes", "want"),
    [
        ([0] * 8, 1),
        ([0] * 4 + [1] * 4, 2),
        ([1, 1, 0, 0], 2),
        ([0, 0, 1, 1, 2, 2, 3, 3], 4),
        ([0, 1], 2),
        ([0, 1, 0, 1], 1),  # a ring would cross four times
        ([1, 0, 0, 1], 2),  # round the end
        ([0, 0, 0, 1], 1),  # uneven
        ([0], 1),
        ([], 1),
    ],
)
def test_a_ring_follows_the_sockets(nodes, want):
    assert islands(nodes) == want
