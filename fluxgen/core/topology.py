"""Which GPU, over which link, how many ranks.

The presets are datasheet values; a GPU that is not in the table works by its properties
(:meth:`Gpu.from_properties`), so nothing is refused by its name or its number of SMs. Note that
the number of SMs is no identity: H100 SXM, H100 NVL, H800 and H200 all have 132.
"""

from __future__ import annotations

import enum
import re
from dataclasses import asdict, dataclass
from typing import Any

from fluxgen.core.errors import UsageError
from fluxgen.core.problem import MAX_WORLD, check_int

MAX_ISLANDS = 8
"""Sockets of one machine."""


class LinkKind(str, enum.Enum):
    """How the ranks' GPUs reach each other."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    HOST = "host"
    """No GPU reaches another's memory: everything goes through the host's, over PCIe."""

    @property
    def over_pcie(self) -> bool:
        """Whether the bytes take the GPUs' PCIe links."""
        return self is not LinkKind.NVLINK

    @classmethod
    def parse(cls, text: str) -> LinkKind:
        """Read a link kind from text.

        Raises:
            UsageError: for an unknown kind.
        """
        try:
            return cls(str(text).strip().lower())
        except ValueError:
            raise UsageError(f"link: expected nvlink, pcie or host; found {text!r}") from None

    @classmethod
    def with_islands(cls, text: str) -> tuple[LinkKind, int]:
        """A link kind, and of ``pcie2`` to ``pcie8`` also how many sockets the GPUs hang from.

        Raises:
            UsageError: as :meth:`parse`.
        """
        name = str(text).strip().lower()
        islands = name.removeprefix("pcie")
        if islands != name and islands in map(str, range(2, MAX_ISLANDS + 1)):
            return cls.PCIE, int(islands)
        return cls.parse(text), 1


@dataclass(frozen=True)
class Gpu:
    """What the search space and the prediction need to know of a GPU.

    Attributes:
        name: normalised slug, e.g. ``h100-sxm``.
        cc: compute capability times ten, e.g. 90.
        sm_count: streaming multiprocessors.
        clock_mhz: boost clock.
        tflops: dense bf16/fp16 rate with fp32 accumulation, TFLOP/s (datasheet).
        mem_gbs: device-memory bandwidth, GB/s. l2_mb: L2 size, MB (10^6 bytes).
        smem_kb: shared memory one block may use, KiB. mem_gb: device memory, GB.
        nvlink_gbs: NVLink bandwidth of one GPU, GB/s in one direction, 0 without NVLink.
        pcie_gbs: PCIe bandwidth of one GPU, GB/s in one direction, as copies reach it.
    """

    name: str
    cc: int
    sm_count: int
    clock_mhz: int
    tflops: float
    mem_gbs: float
    l2_mb: float
    smem_kb: int
    mem_gb: float
    nvlink_gbs: float
    pcie_gbs: float

    @property
    def arch(self) -> str:
        """``sm80``, ``sm86``, ``sm89``, ``sm90``, ..."""
        return f"sm{self.cc}"

    @property
    def generation(self) -> str:
        """``ampere``, ``ada`` or ``hopper`` (and newer): what tables of figures are by."""
        return "hopper" if self.cc >= 90 else "ada" if self.cc == 89 else "ampere"

    @classmethod
    def from_properties(
        cls,
        name: str,
        cc: tuple[int, int],
        sm_count: int,
        clock_mhz: int,
        smem_kb: int,
        mem_gb: float,
        mem_gbs: float = 0.0,
        l2_mb: float = 0.0,
        nvlink_gbs: float = 0.0,
        pcie_gbs: float = 0.0,
    ) -> Gpu:
        """Describe any GPU by what the driver reports of it.

        The tensor rate follows from the compute capability: 2048 FLOP per clock and SM on 8.0,
        1024 on 8.6 and 8.9, 4096 on 9.0 (NVIDIA's architecture white papers).

        Raises:
            UsageError: for a compute capability below 8.0 or a nonsensical count.
        """
        number = cc[0] * 10 + cc[1]
        if number < 80:
            raise UsageError(
                f"target {name!r}: expected compute capability 8.0 or newer (Ampere); "
                f"found {cc[0]}.{cc[1]}"
            )
        check_int("sm_count", sm_count, 1, 1024)
        check_int("clock_mhz", clock_mhz, 1, 10_000)
        check_int("smem_kb", smem_kb, 1, 1024)
        per_clock = {80: 2048, 86: 1024, 87: 1024, 89: 1024, 90: 4096}.get(
            number, 4096 if number >= 90 else 1024
        )
        return cls(
            name=normalise_name(name),
            cc=number,
            sm_count=sm_count,
            clock_mhz=clock_mhz,
            tflops=round(sm_count * clock_mhz * 1e6 * per_clock / 1e12, 1),
            mem_gbs=mem_gbs or (2000.0 if number in (80, 90) else 800.0),
            l2_mb=l2_mb or 40.0,
            smem_kb=smem_kb,
            mem_gb=mem_gb,
            nvlink_gbs=nvlink_gbs,
            pcie_gbs=pcie_gbs or (52.0 if number >= 90 else 25.0),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


# name, cc, SMs, MHz, TFLOP/s, GB/s, L2 MB, smem KiB, GB, NVLink GB/s, PCIe GB/s (datasheets;
# PCIe as large copies reach it: about 25 of gen4's 32, 52 of gen5's 64).
_TABLE: tuple[Gpu, ...] = (
    Gpu("a100-sxm-40gb", 80, 108, 1410, 312, 1555, 40, 163, 40, 300, 25),
    Gpu("a100-sxm-80gb", 80, 108, 1410, 312, 2039, 40, 163, 80, 300, 25),
    Gpu("a100-pcie-40gb", 80, 108, 1410, 312, 1555, 40, 163, 40, 300, 25),
    Gpu("a100-pcie-80gb", 80, 108, 1410, 312, 1935, 40, 163, 80, 300, 25),
    Gpu("a800-sxm-80gb", 80, 108, 1410, 312, 2039, 40, 163, 80, 200, 25),
    Gpu("a30", 80, 56, 1440, 165, 933, 24, 163, 24, 100, 25),
    Gpu("a40", 86, 84, 1740, 149.7, 696, 6, 99, 48, 56, 25),
    Gpu("a6000", 86, 84, 1800, 154.8, 768, 6, 99, 48, 56, 25),
    Gpu("l20", 89, 92, 2520, 119.5, 864, 96, 99, 48, 0, 25),
    Gpu("l40s", 89, 142, 2520, 362, 864, 96, 99, 48, 0, 25),
    Gpu("rtx-4090", 89, 128, 2520, 165.2, 1008, 72, 99, 24, 0, 25),
    Gpu("h20", 90, 78, 1980, 148, 4000, 60, 227, 96, 450, 52),
    Gpu("h100-sxm", 90, 132, 1830, 989, 3350, 50, 227, 80, 450, 52),
    Gpu("h100-pcie", 90, 114, 1755, 756, 2039, 50, 227, 80, 300, 52),
    Gpu("h100-nvl", 90, 132, 1785, 835, 3938, 60, 227, 94, 300, 52),
    Gpu("h800-sxm", 90, 132, 1830, 989, 3350, 50, 227, 80, 200, 52),
    Gpu("h800-pcie", 90, 114, 1755, 756, 2039, 50, 227, 80, 200, 52),
    Gpu("h200", 90, 132, 1830, 989, 4800, 60, 227, 141, 450, 52),
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}
"""The presets by name."""

# Patterns over the normalised device name, most specific first (strings as drivers report them).
_ALIASES: tuple[tuple[str, str], ...] = (
    (r"^a100$|^a100-sxm$|a100-sxm4?-80gb|a100-80gb$", "a100-sxm-80gb"),
    (r"a100-sxm4?-40gb|a100-40gb$", "a100-sxm-40gb"),
    (r"a100-pcie-80gb|a100-80gb-pcie|^a100-pcie$", "a100-pcie-80gb"),
    (r"a100-pcie-40gb|a100-40gb-pcie", "a100-pcie-40gb"),
    (r"^a800$|^a800-sxm|a800-80gb$", "a800-sxm-80gb"),
    (r"^a30$", "a30"),
    (r"^a40$", "a40"),
    (r"^rtx-a6000$|^a6000$", "a6000"),
    (r"^l20$", "l20"),
    (r"^l40s$", "l40s"),
    (r"^(geforce-)?rtx-4090$|^4090$", "rtx-4090"),
    (r"^h20(-96gb-hbm3)?$", "h20"),
    (r"^h100-pcie", "h100-pcie"),
    (r"^h100-nvl", "h100-nvl"),
    (r"^h100$|^h100-sxm5?$|^h100-(sxm5?-)?80gb-hbm3$", "h100-sxm"),
    (r"^h800-pcie", "h800-pcie"),
    (r"^h800$|^h800-sxm5?$|^h800-80gb-hbm3$", "h800-sxm"),
    (r"^h200$|^h200-sxm5?$|^h200-141gb-hbm3e$", "h200"),
)


def normalise_name(name: str) -> str:
    """A device name as a slug, once and for all uses: lower case, ``[a-z0-9.-]``, no vendor.

    ``"NVIDIA H100 80GB HBM3"`` becomes ``h100-sxm``; a name outside the table becomes a plain
    slug (``"NVIDIA A100 MIG 1g.18gb"`` -> ``a100-mig-1g.18gb``), never empty.
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", str(name).lower()).strip("-.")
    slug = re.sub(r"^(nvidia|tesla|quadro)-", "", slug)
    slug = re.sub(r"^(nvidia|tesla|quadro)-", "", slug)[:64].strip("-.")
    if slug in GPUS:
        return slug
    for pattern, preset in _ALIASES:
        if re.search(pattern, slug):
            return preset
    return slug or "unknown-gpu"


_PROPERTIES = {
    "cc": "cc",
    "sms": "sm_count",
    "clock": "clock_mhz",
    "smem": "smem_kb",
    "mem": "mem_gb",
    "membw": "mem_gbs",
    "l2": "l2_mb",
    "nvlink": "nvlink_gbs",
    "pcie": "pcie_gbs",
}


def parse_gpu(text: str) -> Gpu:
    """A GPU from text: a preset, a driver's device name, or ``NAME:cc=90,sms=114,clock=1755,...``.

    The properties are ``cc`` (90 or 9.0), ``sms``, ``clock`` (MHz), ``smem`` (KiB a block),
    ``mem`` (GB), ``membw`` (GB/s), ``l2`` (MB), ``nvlink`` and ``pcie`` (GB/s one way).

    Raises:
        UsageError: for a name that is no preset and comes without properties; lists the presets.
    """
    if not isinstance(text, str):
        raise UsageError(f"target: expected a GPU's name or properties; found {text!r}")
    name, _, rest = text.partition(":")
    slug = normalise_name(name)
    if not rest:
        if slug in GPUS:
            return GPUS[slug]
        raise UsageError(
            f"target: expected one of {', '.join(GPUS)}, or auto, or properties such as "
            f"'{slug}:cc=90,sms=114,clock=1755,smem=227,mem=80'; found {text!r}"
        )
    values: dict[str, float] = {}
    for item in rest.split(","):
        key, _, value = item.partition("=")
        if key.strip() not in _PROPERTIES:
            raise UsageError(
                f"target {name!r}: expected properties {', '.join(_PROPERTIES)}; "
                f"found {key.strip()!r}"
            )
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not 0 <= number < 1e6:
            raise UsageError(
                f"target {name!r}: expected a number for {key.strip()}; found {value!r}"
            )
        values[key.strip()] = number
    missing = [key for key in ("cc", "sms", "clock", "smem", "mem") if key not in values]
    if missing:
        raise UsageError(f"target {name!r}: properties missing: {', '.join(missing)}")
    number = values["cc"] if values["cc"] >= 20 else round(values["cc"] * 10)
    cc = divmod(int(number), 10)
    return Gpu.from_properties(
        name=name,
        cc=cc,
        sm_count=int(values["sms"]),
        clock_mhz=int(values["clock"]),
        smem_kb=int(values["smem"]),
        mem_gb=values["mem"],
        mem_gbs=values.get("membw", 0.0),
        l2_mb=values.get("l2", 0.0),
        nvlink_gbs=values.get("nvlink", 0.0),
        pcie_gbs=values.get("pcie", 0.0),
    )


@dataclass(frozen=True)
class Topology:
    """The machine one tensor-parallel group runs on.

    Attributes:
        gpu: every rank's GPU.
        link: how they reach each other.
        world: ranks of the group.
        bandwidth_gbs: what one rank receives, GB/s in one direction, all peers together.
        latency_us: from a peer's store to a local reader seeing its flag, microseconds.
        islands: sockets that the GPUs hang from, each with as many neighbours in rank order; over
            PCIe what crosses from one to another shares one link.
    """

    gpu: Gpu
    link: LinkKind
    world: int
    bandwidth_gbs: float
    latency_us: float
    islands: int = 1

    @classmethod
    def of(cls, gpu: Gpu | str, link: LinkKind | str, world: int, islands: int = 1) -> Topology:
        """The topology of ``world`` such GPUs with the link's usual bandwidth and latency.

        The text of a link may name the sockets: ``pcie2``.

        Copies reach about 0.88 of NVLink's datasheet rate and all of the ``pcie_gbs`` above.

        Raises:
            UsageError: NVLink asked of a GPU without it, a world outside 1 to ``MAX_WORLD``, or
            islands that the ranks do not fill evenly, or of NVLink.
        """
        the_gpu = gpu if isinstance(gpu, Gpu) else parse_gpu(gpu)
        kind, named = (link, 1) if isinstance(link, LinkKind) else LinkKind.with_islands(link)
        islands = named if islands == 1 else islands
        check_int("world", world, 1, MAX_WORLD)
        if kind is LinkKind.NVLINK and the_gpu.nvlink_gbs <= 0:
            raise UsageError(f"link: {the_gpu.name} has no NVLink; use --link pcie")
        check_int("islands", islands, 1, MAX_ISLANDS)
        if islands > 1 and (kind is not LinkKind.PCIE or world % islands):
            raise UsageError(
                f"islands: expected 1, or over PCIe a divisor of tp={world}; found {islands}"
            )
        if kind is LinkKind.NVLINK:
            return cls(the_gpu, kind, world, round(0.88 * the_gpu.nvlink_gbs, 1), 2.0)
        return cls(the_gpu, kind, world, the_gpu.pcie_gbs, 6.0, islands)

    @property
    def key(self) -> str:
        """``<gpu>-<link>-tp<world>``, over several sockets ``<gpu>-pcie2-tp<world>``: the name of a
        pack's directory."""
        sockets = self.islands if self.islands > 1 else ""
        return f"{self.gpu.name}-{self.link.value}{sockets}-tp{self.world}"
