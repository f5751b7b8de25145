"""Workspaces: symmetric memory of peers, and pinned memory of the host."""
