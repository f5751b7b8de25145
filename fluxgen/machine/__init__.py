"""This machine: its GPUs and how they are wired, found without Torch."""
