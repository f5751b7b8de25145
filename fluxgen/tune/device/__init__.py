"""Measuring on this machine's GPU: the only part of the tuner that imports Torch.

evaluator -> check (all ranks of a call, bit for bit) and rank (one of them, alone) -> timing
"""
