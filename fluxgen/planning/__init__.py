"""A whole step predicted, and a layout chosen, with no GPU: see docs/plan.md.

::

    model, cluster, batch -> layouts -> memory (which fit) -> a layer's tasks on streams, simulated
        -> stages and micro-batches -> a step's time -> the best of them
"""
