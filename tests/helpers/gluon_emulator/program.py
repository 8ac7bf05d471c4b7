"""The program that runs: its place in the grid, and what goes on beside it."""

from __future__ import annotations

from typing import Any


class Program:
    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], warps: int) -> None:
        self.place, self.grid, self.warps = place, grid, warps
        self.number = place[0] + grid[0] * (place[1] + grid[1] * place[2])
        self.copies: list[Any] = []  # asked for, in no group yet
        self.groups: list[list[Any]] = []  # of copies that were not waited for
        self.products: list[Any] = []  # that were not waited for
        self.unfenced: list[Any] = []  # shared memory that products may not see yet


running: Program


def start(program: Program) -> None:
    global running
    running = program
