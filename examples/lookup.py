"""One lookup from Python: what would run for a GEMM of Llama-3.1-8B, how fast, and why."""

import fluxgen


def main() -> None:
    """Look up the gate/up projection at two token counts, one tuned and one between."""
    for m in (4096, 3000):
        found = fluxgen.lookup("ag_gemm", m, 3584, 4096, tp=8, target="h100-sxm", link="nvlink")
        print(found.text)
        if found.kernel is not None:
            print(
                f"  {found.time_us:.0f} us against {found.baseline_us:.0f} us unfused "
                f"({found.provenance.value}), run {found.run}"
            )


if __name__ == "__main__":
    main()
