"""What the ranks of a group agree on, and how their calls are launched."""
