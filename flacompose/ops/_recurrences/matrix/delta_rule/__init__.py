"""The delta rule: a key's old value is read from the decayed state before its new one is written."""
