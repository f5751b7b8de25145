"""A whole step on the stages of a pipeline, as tasks: the 1F1B schedule (arXiv 2104.04473, 2.2)."""

from __future__ import annotations

from fluxgen.predict.simulate import Task, Timeline, simulate

__all__ = ["MOST_ROUNDS", "pipeline"]

MOST_ROUNDS = 256
"""Micro-batches that are simulated one by one."""


def order(stage: int, stages: int, rounds: int) -> list[tuple[str, int]]:
    """What a stage does, in order: forwards until the pipeline is full, then one and one."""
    ahead = min(rounds, stages - stage - 1)
    steps = [("forward", i) for i in range(ahead)]
    for i in range(rounds - ahead):
        steps += [("forward", ahead + i), ("backward", i)]
    return steps + [("backward", i) for i in range(rounds - ahead, rounds)]


def pipeline(forward: list[float], backward: list[float], rounds: int, send: float) -> Timeline:
    """``rounds`` micro-batches through stages of so long a forward and backward, microseconds.

    Args:
        send: from one stage to the next. backward: of no length where there is none.
    """
    stages = len(forward)
    trains = any(backward)
    todo = [
        [step for step in order(s, stages, rounds) if trains or step[0] == "forward"]
        for s in range(stages)
    ]
    tasks: list[Task] = []
    place: dict[tuple[int, str, int], int] = {}
    while any(todo):
        for stage, steps in enumerate(todo):
            while steps:
                kind, i = steps[0]
                before = stage - 1 if kind == "forward" else stage + 1
                needs = [(before, kind, i)] if 0 <= before < stages else []
                if kind == "backward":
                    needs.append((stage, "forward", i))
                if any(need not in place for need in needs):
                    break
                after = []
                for need in needs:
                    if need[0] != stage and send > 0:
                        tasks.append(
                            Task(
                                f"link {need[0]}-{stage}", f"{kind} {i}", "copy", send,
                                (place[need],),
                            )
                        )  # fmt: skip
                        after.append(len(tasks) - 1)
                    else:
                        after.append(place[need])
                us = (forward if kind == "forward" else backward)[stage]
                tasks.append(Task(f"stage {stage}", f"{kind} {i}", kind, us, tuple(after)))
                place[stage, kind, i] = len(tasks) - 1
                steps.pop(0)
    return simulate(tasks)
