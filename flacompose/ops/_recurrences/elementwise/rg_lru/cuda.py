"""Launches of the Triton kernels on CUDA: those of the elementwise scan, which compute the gates too."""

from __future__ import annotations

from flacompose.ops._recurrences.elementwise.scan.cuda import backward as backward
from flacompose.ops._recurrences.elementwise.scan.cuda import chunk as chunk
from flacompose.ops._recurrences.elementwise.scan.cuda import recurrent as recurrent
from flacompose.ops._recurrences.elementwise.scan.cuda import steps as steps
