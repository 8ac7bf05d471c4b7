"""The delta rule: a write replaces the old value of its key, which is read from the decayed state."""
