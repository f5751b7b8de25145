"""Layers around the ops, their shards and their checkpoints."""
