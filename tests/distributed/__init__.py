"""Layers and models on several devices: two processes of the CPU."""
