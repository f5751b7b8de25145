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
    block = inner.integer(("group_size",)) or 0
    return Quantization(method.lower(), 0, block, _modules(inner, "exclude_modules"))


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
        size = section.integer(("group_size", "q_group_size"), low=-1)
        block_k = size if size is not None and size > 0 else 0
    skipped = _modules(section, "modules_to_not_convert") or _modules(section, "ignore")
    return Quantization(method[:60], block_n, block_k, skipped)


def _is_block(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_WIDTH


def _modules(section: Section, name: str) -> tuple[str, ...]:
    return tuple(item for item in section.items(name) or () if isinstance(item, str))
