"""Whether a transport carries a problem over a link, whatever the kernel."""

from __future__ import annotations

from fluxgen.core.config import RunConfig, Transport
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import LinkKind, Topology

HOST_TRANSPORTS = (
    Transport.COPY_ENGINE_PULL, Transport.SM_COPY, Transport.PEER_STORE, Transport.PEER_BROADCAST,
)  # fmt: skip
"""What needs of the workspace, where that is host memory, no more than crosses the link anyway."""


def why_illegal_transport(problem: Problem, topology: Topology, run: RunConfig) -> str | None:
    """Why the transport of ``run`` cannot carry ``problem``, or None."""
    carriers = problem.op.transports
    if run.transport not in carriers:
        valid = " or ".join(transport.value for transport in carriers)
        return f"transport {run.transport.value} does not carry {problem.op.value}; use {valid}"
    if topology.link is LinkKind.HOST and run.transport not in HOST_TRANSPORTS:
        valid = ", ".join(transport.value for transport in HOST_TRANSPORTS)
        return (
            f"transport {run.transport.value}: over the host's memory a kernel would read or write "
            f"its whole matrix there; use one of {valid}"
        )
    if run.transport.pushes and problem.signature.return_gathered:
        name = run.transport.value
        return f"transport {name}: the gathered A is the workspace's; use copy_engine_pull"
    if run.transport is Transport.COPY_ENGINE_RING and problem.tp % 2:
        return (
            f"transport copy_engine_ring: {problem.tp} ranks do not halve over sockets; use a pull"
        )
    if run.transport is Transport.SM_COPY and run.chunks > 1:
        return "chunks: the SM copy brings whole slabs, all at once; use 1"
    if problem.m % problem.tp and not run.transport.in_one_shot:
        return (
            f"m={problem.m} is not a multiple of tp={problem.tp}: only peer_broadcast and "
            "broadcast_packets reduce rows that the ranks do not share evenly"
        )
    return None


def default_transport(signature: Signature, link: LinkKind) -> Transport:
    """The transport an op uses over a link unless a record says otherwise.

    Over PCIe slabs are pulled and drained: what is measured there, with the host's memory as the
    peers, is a pull, and stores of a kernel back up into it.
    """
    if signature.op.scatters:
        drains = link is LinkKind.PCIE
        return Transport.COPY_ENGINE_DRAIN if drains else Transport.PEER_STORE
    pulls = signature.op.replicates and (signature.return_gathered or link.over_pcie)
    return Transport.COPY_ENGINE_PULL if pulls else Transport.COPY_ENGINE_PUSH
