"""What a config says about quantised weights, and which shards its scales cannot follow.

fluxgen's kernels multiply 16-bit types. The shapes of a quantised checkpoint are listed all the
same, for its 16-bit form; this module says so, and where a shard would cut a block of scales.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluxgen.core.errors import ModelConfigError
from fluxgen.shapes.keys import MAX_WIDTH, Section, show


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a checkpoint.

    Attributes:
        method: as in the config, e.g. ``fp8``, ``gptq``, ``mxfp4``.
        block_n, block_k: elements of N and K that share a scale, 0 if one scale spans them all.
        skipped: modules that stay in 16 bits, as the config lists them.
    """

    method: str
    block_n: int
    block_k: int
    skipped: tuple[str, ...]

    def affects(self, *modules: str) -> bool:
        """Whether any of the modules (``self_attn``, ``o_proj``, ...) is quantised.

        Entries that name single layers (``layers.3.mlp``) leave the other layers quantised.
        """
        for entry in self.skipped:
            parts = [part for part in re.split(r"[^a-zA-Z0-9_]+", entry) if part]
            # The entry's last part is the module: "mlp.router" leaves the MLP itself quantised.
            if parts and parts[-1] in modules and not any(part.isdigit() for part in parts):
                return False
        return True

    def describe(self) -> str:
        """One line, e.g. ``fp8 in blocks of 128 x 128 (N x K)``."""
        text = self.method
        if self.block_n or self.block_k:
            n, k = self.block_n or 1, self.block_k or 1
            text += f" in blocks of {n} x {k} (N x K)"
        if self.skipped:
            text += f"; {len(self.skipped)} module pattern(s) stay in 16 bits"
        return text


def read_quantization(config: Section, side: Mapping[str, Any]) -> Quantization | None:
    """The quantisation of a model, or None.

    Args:
        config: the section that may hold ``quantization_config``.
        side: the object of ``hf_quant_config.json``, empty without one.

    Raises:
        ModelConfigError: for values of the wrong type.
    """
    section = config.section("quantization_config") or config.section("compression_config")
    if section is not None:
        return _from_section(section)
    inner = Section(side, "hf_quant_config.json").section("quantization")
    if inner is None:
        return None
    method = inner.text("quant_algo")
    if not method:
        return None
    block_n, block_k = _blocks(inner)
    return Quantization(method.lower(), block_n, block_k, _modules(inner, "exclude_modules"))


def _from_section(section: Section) -> Quantization:
    method = (section.text("quant_method") or section.text("quant_algo") or "unknown").lower()
    block_n = block_k = 0
    blocks = section.items("weight_block_size")
    if blocks is not None:
        if len(blocks) != 2 or not all(_is_block(block) for block in blocks):
            raise ModelConfigError(
                f"{section.where}: weight_block_size: expected two positive integers; "
                f"found {show(blocks)}"
            )
        block_n, block_k = blocks
    elif method == "mxfp4":
        block_k = 32
    else:
        block_n, block_k = _blocks(section)
    skipped = _modules(section, "modules_to_not_convert") or _modules(section, "ignore")
    return Quantization(method[:60], block_n, block_k, skipped)


def _blocks(section: Section) -> tuple[int, int]:
    """Elements of N and K that share a scale: here, or in the groups of modules that it lists.

    compressed-tensors and modelopt have ``config_groups``, quark ``global_quant_config`` and
    ``layer_quant_config``; each group describes its ``weights`` (quark: ``weight``). Of groups that
    differ the largest block counts, which a shard cuts most easily.
    """
    places = [section]
    for name in ("config_groups", "layer_quant_config"):
        groups = section.section(name)
        if groups is not None:
            places += [g for g in map(groups.section, groups.data) if g is not None]
    whole = section.section("global_quant_config")
    places += [whole] if whole is not None else []
    blocks = []
    for place in places:
        inner = [s for name in ("weights", "weight") if (s := _object(place, name)) is not None]
        for each in (place, *inner):
            size = each.integer(("group_size", "q_group_size"), low=-1)
            blocks.append((0, size if size is not None and size > 0 else 0))
            shape = each.data.get("block_structure")
            if isinstance(shape, str):  # as 128x128
                shape = [int(n) if n.isdecimal() else n for n in shape.lower().split("x")]
            if shape is not None:
                if not isinstance(shape, list) or len(shape) != 2 or not all(map(_is_block, shape)):
                    raise ModelConfigError(
                        f"{each.where}: block_structure: expected two positive integers; "
                        f"found {show(each.data['block_structure'])}"
                    )
                blocks.append((shape[0], shape[1]))
    return max(n for n, _ in blocks), max(k for _, k in blocks)


def _object(place: Section, name: str) -> Section | None:
    """An object, or the first of a list of them; None for anything else."""
    value = place.data.get(name)
    first = value[0] if isinstance(value, list) and value else value
    return Section(first, f"{place.where}: {name}") if isinstance(first, Mapping) else None


def _is_block(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_WIDTH


def _modules(section: Section, name: str) -> tuple[str, ...]:
    return tuple(item for item in section.items(name) or () if isinstance(item, str))
