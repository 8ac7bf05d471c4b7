"""``python tests/helpers/mutations.py``: lines of the package are broken, one at a time, and the tests that guard each must fail.

Each break is made in a copy of the checkout, where the named tests then run until the first that fails. It prints a line
for each, and exits with 1 if one was not seen, or if its line is gone: then the list below is to be brought up to date.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Break(NamedTuple):
    """A file of the package, a line's part that it has once, what takes its place, and the tests that see it."""

    path: str
    line: str
    broken: str
    tests: str
    select: str = ""


VALUES, PACKED = "contract/test_values.py", "contract/test_packed.py"
KERNELS = "ops/_recurrences/test_kernels.py"
GLUON = "ops/_recurrences/matrix/test_delta_rule_on_hopper.py"
SHARED, COMPOSED = "distributed/test_context_parallel.py", "distributed/test_context_composition.py"
BREAKS = [
    # The recurrences in PyTorch
    Break("ops/_recurrences/matrix/channel_decay/eager.py", "return _read(_read(self.q, self.gk) @ S, self.gv)", "return _read(self.q, self.gk) @ S", VALUES, "test_lengths and gk-gv"),
    Break("ops/_launch/row_split.py", "self.N, self.device = sequences", "self.of = sequences\n        self.N, self.device = sequences", "ops/_recurrences/test_launches.py", "no_cycles"),
    Break("ops/_launch/hopper.py", "or launches_into_graph()", "", "ops/_recurrences/test_launches.py", "gluon"),
    Break("ops/_launch/hopper.py", "x.data_ptr() % 16 == 0", "True", "ops/_recurrences/test_launches.py", "gluon"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "takes(x.read_by, K):\n            return (in_gluon,)", "takes(x.read_by, K, V):\n            return (in_gluon,)", "ops/_recurrences/test_launches.py", "gluon"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "takes(x.read_by, K):\n        first", "takes(x.read_by[:1], K):\n        first", "ops/_recurrences/test_launches.py", "gluon_of_channels"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "\"IN_BLOCKS\": False", "\"IN_BLOCKS\": True", "ops/_recurrences/test_launches.py", "gluon_of_channels"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "\"ADDS\": i > 0", "\"ADDS\": False", "ops/_recurrences/test_launches.py", "gluon"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "if hopper.takes(tokens.chip, (*x.read_by, do)", "if hopper.takes(tokens.chip, (do,)", "ops/_recurrences/test_launches.py", "gluon_of_channels"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "partial(hopper.takes, tokens.chip, (*x.read_by, do))", "partial(hopper.takes, tokens.chip, x.read_by)", "ops/_recurrences/test_launches.py", "gluon_on_hopper"),
    Break("ops/_recurrences/matrix/delta_rule/operands.py", "(self.q, self.k, self.a) if", "(self.q, self.k) if", "ops/_recurrences/test_launches.py", "gluon_reads"),
    Break("ops/_recurrences/matrix/delta_rule/launch_factors.py", "\"READ_BEFORE\": x.read_before", "\"READ_BEFORE\": False", "ops/_recurrences/test_launches.py", "gluon_reads"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_gradients.py", "[C, BK], OF_K)\n        copy(a_s", "[2, C, BK], OF_K).index(0)\n        copy(a_s", "ops/_recurrences/test_fit.py", "side_by_side"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "tokens.H // H <= LARGEST_GROUP", "True", "ops/_recurrences/test_launches.py", "gluon_adds"),
    Break("ops/_tiles/hopper.py", "mask=(i < size) & (d < to.shape[1])", "mask=(i < to.shape[0]) & (d < to.shape[1])", GLUON, "packed"),
    Break("ops/_tiles/hopper.py", "    fence_async_shared()\n", "", GLUON, "dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_factors.py", "blocks.slice(i, 1, 2).permute((0, 1, 3, 2))", "blocks.slice(i, 1, 3)", GLUON, "dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_factors.py", "        wait_for_copies(0)\n        qk", "        qk", GLUON, "dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_factors.py", "gl.maximum(along_key, 1.0)", "along_key", GLUON, "segments"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_gradients.py", "wait_for_copies(1 if a is None else 2)", "wait_for_copies(2 if a is None else 3)", GLUON, "dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_gradients.py", "warpgroup_mma(pairs_s.index(0).permute((1, 0))", "warpgroup_mma(pairs_s.index(0)", GLUON, "dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_gradients.py", "of_state * gl.exp2(total)", "of_state", GLUON, "dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "[C // (4 * BLOCKS), 2 * BLOCKS, K], TABLE_LAYOUT\n    ).index(0)", "[2 * BLOCKS, K], TABLE_LAYOUT\n    )", GLUON, "kda and dense and weak"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "    wait_for_copies(0)\n    # A loop", "    # A loop", GLUON, "kda and dense"),
    Break("ops/_tiles/hopper.py", "    low = _cut(x - high)\n", "    low = x - high\n", GLUON, "beside_large"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/gate_tables.py", "of_blocks * roots * roots", "of_blocks * roots", GLUON, "kda and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "int(middle <= half < 2 * kind + 1)", "int(middle <= half < 2 * kind)", GLUON, "kda and strong and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "s[:, None] <= t[None, :], qk", "s[:, None] < t[None, :], qk", GLUON, "kda and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "decayed(writer, tables_s.index(FACTOR_TO_END))", "writer", GLUON, "kda and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "0.5 * sums, sums))\n", "0.5 * sums, sums))\n    left = gl.where(kind == FACTOR_TO_END, left * left, left)\n    left = gl.where(kind == FACTOR_TO_END, gl.sqrt(left), left)\n", GLUON, "almost_nothing and end"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "0.5 * sums, sums))\n", "0.5 * sums, sums))\n    left = gl.where(kind == FACTOR_FROM_START, left * left, left)\n    left = gl.where(kind == FACTOR_FROM_START, gl.sqrt(left), left)\n", GLUON, "almost_nothing and start"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "ROOT_OF_SHIFT = gl.constexpr(2.0**30)", "ROOT_OF_SHIFT = gl.constexpr(2.0**29)", GLUON, "kda and strong and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "gl.constexpr(2.0**60)\nROOT_OF_SHIFT = gl.constexpr(2.0**30)", "gl.constexpr(1.0)\nROOT_OF_SHIFT = gl.constexpr(1.0)", GLUON, "almost_nothing and between"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "gl.where(s[:, None] <= t[None, :], qk * weights, 0.0)", "qk * weights * (s[:, None] <= t[None, :]).to(gl.float32)", GLUON, "within_float32"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "clamp_gate(load_gates(gk + first_gate, HV * K, size, ROW_LAYOUT, C, K))", "load_gates(gk + first_gate, HV * K, size, ROW_LAYOUT, C, K)", GLUON, "in_no_sum"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "half < middle) - int(middle <= half < BLOCKS.value)", "half < middle)", GLUON, "factorisable_in_blocks and early"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "int(BLOCKS.value <= half < middle) - ", "-", GLUON, "factorisable_in_blocks and late"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "scaled_gate_size(gl.max(gl.max(gl.abs(g), 1), 0), gl.bfloat16)", "0.0", GLUON, "factorisable_in_blocks and size"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "        gl.store(factorisable_chunks + rh, 0)\n", "", GLUON, "factorisable_in_blocks and left"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_factors.py", "g = sum_of_parts(readers_s, HALVES)", "g = 2.0 * sum_of_parts(readers_s, HALVES)", GLUON, "float32"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_chunk_gradients.py", "            a = a.permute((1, 0))\n", "            a = a\n", GLUON, "kda and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_chunk_gradients.py", "    wait_for_copies(0)\n\n    # 3.", "\n    # 3.", GLUON, "kda and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "d_qk, 0.0), gl.bfloat16", "-d_qk, 0.0), gl.bfloat16", GLUON, "kda and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "    middle = 2 * block + 1\n", "    middle = 2 * block\n", GLUON, "kda and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/gate_tables.py", "of_blocks * roots * roots", "of_blocks * (roots * roots)", GLUON, "two_tokens or almost"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "roots_s.index(TO_BLOCK + block)", "roots_s.index(block)", GLUON, "kda and dense and strong"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "gl.where(s > t - block * BLOCK", "gl.where(s > t", GLUON, "kda and dense and strong"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "= second, third, fourth, of_block", "= of_block, second, third, fourth", GLUON, "kda and dense and strong"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "    out = warpgroup_mma(low, low_s, zeros, use_acc=False, is_async=True)\n", "    out = zeros\n", GLUON, "two_tokens"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "sum_of_parts(x_s, OUT) * out", "x_s.index(0).load(OUT).to(gl.float32) * out", GLUON, "two_tokens"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "PARTS: gl.constexpr = 2 if g.dtype == gl.float32 else 1", "PARTS: gl.constexpr = 1", GLUON, "a_gate_in_float32"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "blocks_s.index(BLOCKS + block)", "blocks_s.index(block)", GLUON, "kda and dense and strong"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "kind >= GRADIENT_FROM_START) and ", "kind > GRADIENT_FROM_START) and ", GLUON, "kda and dense and strong"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "            _add_sums(sums_s.index(block), sum_of_parts(x_s, OUT) * out)\n", "            pass\n", GLUON, "kda and dense and strong"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "        all_sums_s.store(gl.zeros([GRADIENT_KINDS * BLOCKS, BK], gl.float32, ROW_LAYOUT))\n", "        pass\n", GLUON, "kda and dense and strong"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "    copy(k_s, k + of_keys, H * K, size)\n    commit_group()\n    if GATES", "    commit_group()\n    if GATES", GLUON, "kda and dense and strong"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "d_diagonal * (sum_of_parts(writer_s, L) * to_middle)", "d_diagonal * to_middle", GLUON, "kda and dense and strong"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "gradient = d_total\n", "gradient = 0.0 * d_total\n", GLUON, "kda and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "        wait_for_copies(0)\n        x = x_s", "        x = x_s", GLUON, "kda and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "        gl.store(factorisable_tiles, 1)\n", "", GLUON, "factorisable_in_blocks"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "gl.max(gl.max(gl.abs(middle), 1), 0)", "0.0 * gl.max(gl.max(gl.abs(middle), 1), 0)", GLUON, "factorisable_in_blocks"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "gl.max(gl.max(scaled_gate_size(g.to(gl.float32), gl.bfloat16), 1), 0)", "0.0", GLUON, "factorisable_in_blocks"),
    Break("ops/_recurrences/matrix/delta_rule/launch_factors.py", "= gates.factorisable_chunks", "= x.gk if x.gk is None else gates.factorisable_chunks.clone()", GLUON, "factorisable_in_blocks"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_chunk_gradients.py", "x_s, zeros, 2, rest_s)", "x_s, zeros, 2)", GLUON, "beside_large"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_block_gradients.py", "writer_s, zeros, 2, x_s.index(1))", "writer_s, zeros, 2)", GLUON, "beside_large"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/channel_chunk_gradients.py", "(of_early + by_state)[None, :]", "of_early[None, :]", GLUON, "kda and dense"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", " and x.v_token % 8 == 0", "", "ops/_recurrences/test_launches.py", "gluon_passes_states_forwards"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "forward and x.reads_by_key and", "forward and", "ops/_recurrences/test_launches.py", "gluon_passes_states_forwards"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "takes((*x.read_by, x.v), K, V)", "takes(x.read_by, K, V)", "ops/_recurrences/test_launches.py", "gluon_passes_states_forwards"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_state_passing.py", "[1, C, V], VALUES", "[2, C, V], VALUES", "ops/_recurrences/test_fit.py", "state_passing_in_gluon"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_state_passing.py", "wait_for_copies(1)  # all but", "wait_for_copies(2)  # all but", GLUON, "delta and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_state_passing.py", "warpgroup_mma_wait(3, [out]) * (from_start * scale)", "warpgroup_mma_wait(3, [out]) * scale", GLUON, "gated_delta and dense"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_state_passing.py", "        S *= of_chunk\n", "        S *= of_next\n", GLUON, "gated_delta and packed"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_backward.py", "        wait_for_copies(1)\n        if more", "        wait_for_copies(2)\n        if more", GLUON, "head_backward"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_backward.py", "written *= gl.exp2(total - sums_.load(gl.SliceLayout(1, L)))[:, None]", "pass", GLUON, "head_backward and gated"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_backward.py", "next_rows = ((start - C)", "next_rows = (start", GLUON, "head_backward"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_backward.py", "gl.minimum(hi - lo - chunk * C, C)", "C", GLUON, "head_backward"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_backward.py", "if segment == 0:", "if True:", GLUON, "head_backward and segments"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "tokens.H > LARGEST_GROUP * H or", "", "ops/_recurrences/test_launches.py", "head_backward_in_gluon"),
    Break("ops/_recurrences/matrix/delta_rule/cuda.py", "        S = None  # gives", "        # gives", "ops/_recurrences/test_launches.py", "heads_are_added"),
    Break("ops/_recurrences/matrix/delta_rule/launch_gradients.py", "filter(wants, (\"q\", \"k\"))", "(\"q\", \"k\")", "ops/_recurrences/test_launches.py", "heads_are_added"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_backward.py", "h // GROUP", "h % HK", GLUON, "head_backward and groups"),
    Break("ops/_recurrences/matrix/delta_rule/head_gradients.py", "(total.to(tl.float32) + added.to(tl.float32)).to(total.dtype)", "total", GLUON, "head_backward and groups"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "0.9 * RESIDENT_PROGRAMS[K] * tile_count(programs, RESIDENT_PROGRAMS[K])", "0.9 * RESIDENT_PROGRAMS[K]", "ops/_recurrences/test_launches.py", "head_backward_in_gluon"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "            one = tl.where(is_zero, 0.0, 1.0)\n", "", GLUON, "segments"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "if WARM_STARTS and not ENDS:", "if False:", GLUON, "segments"),
    Break("ops/_recurrences/matrix/token.py", "else read + before", "else read", VALUES, "token and rwkv6"),
    Break("ops/_recurrences/matrix/cache_block.py", "((a @ b.mT) * self.pair).tril", "(a @ b.mT).tril", VALUES, "lengths and simple_gla"),
    Break("ops/_recurrences/matrix/token.py", "((q * scale).unsqueeze(-2)", "(q.unsqueeze(-2)", VALUES, "token_by and simple_gla"),
    Break("ops/_recurrences/matrix/token.py", "v = v - (a.unsqueeze", "v = v + (a.unsqueeze", VALUES, "token_by and delta_rule"),
    Break("ops/_recurrences/matrix/token.py", "* (a.unsqueeze(-2) @ (before if read_before else S))", "* (a.unsqueeze(-2) @ S)", "contract/test_states.py", "plr"),
    Break("ops/_recurrences/matrix/token.py", "(before if read_before else S)).squeeze", "S).squeeze", VALUES, "token_by and comba and not comba-after"),
    Break("ops/_recurrences/matrix/delta_rule/eager.py", "dg + self.gates_of_a.gradient", "dg + gates.gradient", VALUES, "lengths and comba and not comba-after"),
    Break("ops/_recurrences/matrix/cache_block.py", "(0, 0, -1, 1)", "(0, 0, 0, 0)", VALUES, "lengths and comba and not comba-after"),
    Break("ops/_recurrences/matrix/low_rank/eager.py", "self.A_qb.mT @ do, self.b_write", "0 * do, self.b_write", VALUES, "losses and dplr"),
    Break("ops/_recurrences/matrix/low_rank/eager.py", "gradient(exponents_a, reads_of_a", "gradient(exponents_q, reads_of_a", VALUES, "lengths and dplr"),
    Break("ops/_recurrences/elementwise/scan/eager.py", "decay, d_final, reverse=True", "decay, None, reverse=True", VALUES, "losses and hgrn"),
    Break("ops/_recurrences/short_conv/eager.py", "(1 + a * (1 - s))", "(1 + a * s)", VALUES, "lengths and causal_conv1d"),
    Break("ops/_recurrences/elementwise/selective_scan/eager.py", "dA = dA + (d_exponent", "dA = dA - (d_exponent", VALUES, "lengths and selective_scan"),
    Break("ops/_recurrences/fused/slot_attention/eager.py", "of_tokens(of_values.get(\"gk\"), of_keys.get(\"gv\"))", "of_tokens(of_values.get(\"gk\"))", "ops/_recurrences/fused/test_slot_attention.py"),
    Break("ops/_recurrences/matrix/eager.py", "q=normalized(inputs.q), k", "k", "ops/_recurrences/matrix/test_delta_rule.py", "update"),
    Break("ops/_launch/operands.py", "if in_place and initial", "if initial", "ops/_recurrences/test_update_kernels.py"),
    Break("ops/_tiles/blocks.py", "q_ *= tl.rsqrt(tl.sum(q_ * q_, 0) + in_float32(norm_eps))", "pass", "ops/_recurrences/test_update_kernels.py"),
    Break("ops/_recurrences/short_conv/cuda.py", "initial_state if in_place and one_token", "None if in_place and one_token", "ops/_recurrences/test_update_kernels.py"),
    Break("integrations/modeling/qwen3_next.py", "len(args) <= 1 and all(x is None for x in given)", "True", "integrations/test_modeling.py", "mask"),
    Break("ops/_recurrences/states_of_tokens.py", "T - stride * i", "T - i", "contract/test_states.py", "shorter and product"),
    Break("ops/_recurrences/states_of_tokens.py", "dict(zip(self.initial, state))", "dict(zip(self.initial, [None if x is None else x.detach() for x in state]))", "contract/test_states.py", "gradient"),
    Break("ops/_parallel/transitions.py", "return Matrix(self.M.mT)", "return Matrix(self.M)", "ops/_parallel/test_transitions.py", "transposes and delta_rule"),
    Break("ops/_arguments/call.py", "argument not in required", "True", "contract/test_errors.py", "not_a_tensor and kda"),
    Break("ops/_arguments/call.py", 'and violated(sizes["HV"] % sizes["H"] == 0)', 'and sizes["HV"] % sizes["H"] != 0', "contract/test_sizes.py", "only_the_data_know"),
    Break("ops/_arguments/intermediate_states.py", "and not x.is_nested ", "", "contract/test_states.py", "errors and gla"),
    Break("ops/_parallel/span_ends.py", "made[name] = made[name] + of_tokens", "made[name] = made[name] - of_tokens", "ops/_parallel/test_transitions.py", "recurrence and scan"),
    Break("ops/_parallel/span_ends.py", "initial_state=F.pad(eye, (V, 0))", "initial_state=None", "ops/_parallel/test_transitions.py", "recurrence and low_rank"),
    Break("ops/_recurrences/matrix/delta_rule/launch_state_passing.py", "initial = _joined(x, None, eye) if x.plan.is_split else eye", "initial = eye", "ops/_parallel/test_transitions_kernels.py", "delta_rule"),
    Break("ops/_tensors/packed.py", "(token < end[sequence, None])", "(token <= end[sequence, None])", PACKED, "test_packed and chunk_gla"),
    Break("ops/_tensors/packed.py", "(t < cu[-1])", "(t <= cu[-1])", PACKED, "tail_holds"),
    Break("ops/_composed/logsumexp.py", "torch.sigmoid(x - before)", "torch.sigmoid(before - x)", VALUES, "lengths and abc"),
    Break("ops/_recurrences/elementwise/stabilizer/eager.py", "(before.double() - m.double())", "(before - m)", "ops/_recurrences/elementwise/test_stabilizer.py"),
    Break("ops/_recurrences/elementwise/stabilizer/eager.py", "decay + decay.roll(step, 1)", "decay", "ops/_recurrences/elementwise/test_stabilizer.py"),
    Break("ops/_recurrences/fused/mlstm/eager.py", "torch.sigmoid(-upcast", "torch.sigmoid(upcast", "ops/_recurrences/fused/test_mlstm.py", "one_token"),
    Break("ops/_recurrences/fused/mlstm/kernels.py", "larger(i_, LOWEST)", "i_", "ops/_recurrences/fused/test_mlstm_kernels.py"),
    Break("ops/_recurrences/matrix/delta_rule/channel_factors.py", "ak = tl.where(within, dot_in_parts(writer, in_parts(tl.trans(a * to_middle), DOT), DOT), 0.0)", "ak = dot_in_parts(writer, in_parts(tl.trans(a * to_middle), DOT), DOT)", KERNELS, "test_gates and kda and 4.0"),
    Break("ops/_recurrences/matrix/delta_rule/channel_factors.py", "first += BLOCK_LEVELS", "first += 3", KERNELS, "test_gates and kda and 4.0"),
    Break("ops/_recurrences/matrix/delta_rule/channel_factors.py", "if tl.max(tl.abs(middle)) < FACTORISABLE_BOUND:", "if tl.max(tl.abs(middle)) < 1e9:", KERNELS, "test_gates and kda and 30.0"),
    Break("ops/_recurrences/matrix/head_decay/gradients.py", "tl.exp2(-between if BACKWARDS else between)", "tl.exp2(-tl.abs(between))", KERNELS, "above_zero"),
    Break("ops/_recurrences/matrix/head_decay/gradients.py", "between *= beta_", "pass", KERNELS, "of_two_blocks and g-beta"),
    Break("ops/_recurrences/matrix/head_decay/plan.py", "> 16 else 64", "> 15 else 64", "ops/_recurrences/test_fit.py", "chunks_of_groups"),
    Break("ops/_recurrences/matrix/head_decay/plan.py", "group // parts <= 32", "group // parts <= 36", KERNELS, "many_heads"),
    Break("ops/_recurrences/matrix/gates_of_heads.py", "part - 3 * LEAVINGS", "part", KERNELS, "of_two_blocks and g-beta"),
    Break("ops/_recurrences/matrix/gates_of_heads.py", "tl.where(block == 0, between, 0.0)", "0.0", KERNELS, "of_two_blocks and g-beta"),
    Break("ops/_recurrences/short_conv/cuda.py", " or always_true(x.shape[1] == 0)", "", "ops/_recurrences/short_conv/test_causal_conv1d_kernels.py", "no_tokens"),
    Break("ops/_recurrences/elementwise/stabilizer/kernels.py", "larger(m_, decay + last)", "m_", "ops/_recurrences/elementwise/test_stabilizer_kernels.py"),
    Break("ops/_recurrences/elementwise/stabilizer/kernels.py", "t == size - 1", "t == C - 1", "ops/_recurrences/elementwise/test_stabilizer_kernels.py"),
    Break("ops/mlstm.py", "(-m_t).exp()", "m_t.exp()", "ops/_recurrences/fused/test_mlstm.py", "stabiliser"),
    Break("ops/_recurrences/fused/gated_skip/op.py", "is_compiling() or ", "", "ops/_recurrences/fused/test_gated_skip.py", "graphs"),
    Break("ops/_recurrences/fused/gated_skip/eager.py", "(1 + z * (1 - s))", "(1 + z * s)", "ops/_recurrences/fused/test_gated_skip.py", "values"),
    Break("ops/_recurrences/fused/gated_skip/eager.py", "return without_tail(inputs.cu_seqlens, o.to(inputs.x.dtype))", "return (o.to(inputs.x.dtype),)", "ops/_recurrences/fused/test_gated_skip.py", "values"),
    Break("ops/_recurrences/fused/gated_skip/cuda.py", "dD[: rows.chunks].sum(0)", "dD[0]", "ops/_recurrences/fused/test_gated_skip_kernels.py"),
    Break("ops/_recurrences/fused/gated_skip/kernels.py", "first + t < tl.load", "first + t <= tl.load", "ops/_recurrences/fused/test_gated_skip_kernels.py"),
    Break("ops/_recurrences/fused/gated_skip/kernels.py", "p if E == P else p * 0", "p * 0", "ops/_recurrences/fused/test_gated_skip_kernels.py"),
    Break("ops/_recurrences/fused/gated_skip/kernels.py", "(1 + z_ * (1 - s))", "(1 + z_ * s)", "ops/_recurrences/fused/test_gated_skip_kernels.py"),
    Break("ops/_recurrences/fused/ssd/op.py", "is_exporting()", "False", "ops/_recurrences/fused/test_ssd.py", "who_calls"),
    Break("ops/_recurrences/fused/ssd/op.py", "sharing() is not None", "False", "ops/_recurrences/fused/test_ssd.py", "who_calls"),
    Break("ops/_recurrences/fused/ssd/eager.py", "rates.masked_fill(decays_to_zero(rates), 0)", "rates", "ops/_recurrences/fused/test_ssd.py", "extremes and operator"),
    Break("ops/_recurrences/fused/ssd/eager.py", "found[\"v\"] + of_skip.pop(\"x\")", "found[\"v\"] + 0 * of_skip.pop(\"x\")", "ops/_recurrences/fused/test_ssd.py", "the_operator"),
    Break("ops/_recurrences/fused/ssd/kernels.py", " | (delta * A_[None, :] < LEAST_GATE)", "", "ops/_recurrences/fused/test_ssd_kernels.py", "extremes"),
    Break("ops/_tiles/blocks.py", "u == 1.0, e, ", "u == 1.0, 0.0, ", "ops/_recurrences/fused/test_ssd_kernels.py", "extremes"),
    Break("ops/_recurrences/fused/ssd/kernels.py", "(free < least) | (free > most)", "free < least", "ops/_recurrences/fused/test_ssd_kernels.py", "limits"),
    Break("ops/_recurrences/fused/ssd/cuda.py", "d_skip[: scan.row.count]", "0 * d_skip[: scan.row.count]", "ops/_recurrences/fused/test_ssd_kernels.py", "D"),
    Break("ops/_recurrences/matrix/head_decay/kernels.py", "(1 + z_ * (1 - s))", "(1 + z_ * s)", "ops/_recurrences/fused/test_ssd_kernels.py", "z"),
    Break("ops/_recurrences/matrix/head_decay/kernels.py", "h * E + d2 * step", "h * E", "ops/_recurrences/fused/test_ssd_kernels.py", "D"),
    Break("ops/_operators/derivatives.py", "(outputs[0], out_dims[0]) if len(returns) == 1 else", "", "ops/_recurrences/fused/test_gated_skip.py", "transforms"),
    Break("ops/_recurrences/fused/normalizer/eager.py", "d_weight * z.sgn()", "d_weight", VALUES, "lengths and mlstm"),
    Break("ops/_recurrences/fused/normalizer/eager.py", "is_floor = z.abs() <= floor", "is_floor = z.abs() > floor", VALUES, "lengths and mlstm"),
    Break("ops/_recurrences/fused/normalizer/eager.py", "[:, None, None], 1)", "[:, None, None], 0)", "ops/_recurrences/fused/test_normalizer.py"),
    Break("ops/_recurrences/fused/normalizer/kernels.py", "tl.exp(high + low) if REVERSE", "tl.exp(high) if REVERSE", KERNELS, "dense and mlstm"),
    Break("ops/_recurrences/fused/normalizer/kernels.py", "begin + stop - 1 - i if REVERSE", "stop - 1 - i if REVERSE", KERNELS, "segments and mlstm"),
    Break("ops/_recurrences/fused/normalizer/kernels.py", "is_floor = tl.abs(z) <= floor_", "is_floor = tl.abs(z) < 0.0", KERNELS, "dense and mlstm"),
    Break("ops/_recurrences/fused/normalizer/kernels.py", "tl.where(is_floor, d_weight, 0.0)", "d_weight", "ops/_recurrences/fused/test_normalizer_kernels.py"),
    Break("ops/_recurrences/fused/normalizer/kernels.py", "(left * beta_)[None, :]", "left[None, :]", KERNELS, "dense and mlstm"),
    Break("ops/_recurrences/fused/normalizer/kernels.py", "to_end *= beta_", "to_end *= 1.0", KERNELS, "dense and mlstm"),
    Break("ops/_tensors/grouped_queries.py", "(T, groups)).transpose(2, 3)", "(T, groups)).flip(2).transpose(2, 3)", VALUES, "lengths and grouped"),
    # The public functions
    Break("ops/_recurrences/matrix/eager.py", "keepdim=True) + NORM_EPS)", "keepdim=True))", "ops/_recurrences/matrix/test_delta_rule.py"),
    Break("ops/gated_delta_rule.py", "(2 if neg_eigval else 1)", "1", "ops/_recurrences/matrix/test_delta_rule.py"),
    Break("ops/gated_delta_product.py", "(T, n))[:, :, -1]", "(T, n))[:, :, 0]", VALUES, "lengths and product"),
    Break("ops/_tensors/dtype.py", "x.dtype == y.dtype:", "False:", "ops/_tensors/test_dtype.py"),
    Break("ops/comba.py", "_replace(q=q, k=k, a=p)", "_replace(q=q, k=k, a=k)", VALUES, "lengths and comba"),
    Break("ops/comba.py", 'erase == "before"', "False", VALUES, "lengths and comba and not comba-after"),
    Break("ops/comba.py", 'erase: str = "before",\n)', 'erase: str = "after",\n)', VALUES, "lengths and chunk_comba and not comba-after"),
    Break("ops/_recurrences/matrix/op.py", "erases=lambda inputs: inputs.delta_rule or inputs.b is not None", "erases=lambda inputs: inputs.delta_rule", "ops/_parallel/test_transitions.py", "low_rank"),
    Break("ops/_recurrences/matrix/inputs.py", "{\"gk\", \"gv\", \"u\", \"softmax\"", "{\"gk\", \"gv\", \"softmax\"", VALUES, "bonus-recurrent"),
    Break("ops/_arguments/call.py", "_tensors_of(op, shared_heads)", "_tensors_of(op, True)", "contract/test_errors.py", "chunk_gla"),
    Break("ops/linear_recurrence.py", "b=-written", "b=written", "ops/_recurrences/matrix/test_linear_recurrence.py", "without_a_function"),
    Break("ops/linear_recurrence.py", "gv = _with(g, gv)", "gv = gv", "ops/_recurrences/matrix/test_linear_recurrence.py", "without_a_function"),
    Break("ops/linear_recurrence.py", "delta_rule=beta is not None, read_before=reads_before(erase)", "delta_rule=beta is not None, read_before=True", "ops/_recurrences/matrix/test_linear_recurrence.py", "without_a_function"),
    Break("ops/linear_recurrence.py", "op.recurrent if always_true(q.shape[1] == 1) and sharing() is None else op.chunk", "op.chunk", "ops/_recurrences/matrix/test_linear_recurrence.py", "one_token"),
    Break("ops/linear_recurrence.py", "u, beta, a, b, initial_state", "u, beta, None, b, initial_state", "ops/_recurrences/matrix/test_linear_recurrence.py", "rows and comba"),
    Break("ops/lightning_attn.py", "logspace(-8 / HV, -8, HV", "logspace(-8, -8 / HV, HV", "ops/_recurrences/matrix/test_lightning_attn.py"),
    Break("ops/retention.py", "power.neg_().log1p_()", "power.neg_()", "ops/_recurrences/matrix/test_retention.py"),
    Break("ops/_recurrences/fused/mamba3/eager.py", "beta=g.exp() * (DT - c)", "beta=DT - c", "ops/_composed/test_mamba3.py"),
    Break("ops/_recurrences/fused/mamba3/kernels.py", "tl.where(s % 2 == 0, -sin, sin)", "sin", "ops/_composed/test_mamba3_kernels.py"),
    Break("ops/_recurrences/fused/mamba3/kernels.py", "angle -= 2 * tl.floor(0.5 * angle + 0.5)", "angle -= 0", "ops/_composed/test_mamba3_kernels.py"),
    Break("ops/_recurrences/fused/mamba3/kernels.py", "h // (HV // H_ANGLES) * A", "h * A", "ops/_composed/test_mamba3_kernels.py"),
    Break("ops/_composed/mamba3.py", "inputs.V.shape[1] == 1) and sharing() is None", "inputs.V.shape[1] == 1)", "distributed/test_context_parallel.py", "edges"),
    Break("ops/_composed/mamba3.py", "is lengths is num_states is None", "is num_states is None", "layers/test_laws.py", "generation and mamba3"),
    Break("ops/_composed/mamba3.py", "written = g.exp() * (c_before", "written = (c_before", "ops/_composed/test_mamba3.py"),
    Break("ops/_composed/mamba3.py", "(c_before + (dt - c))", "(c_before + dt)", "ops/_composed/test_mamba3.py", "values"),
    Break("ops/_composed/mamba3.py", ".triu(1)", ".triu(2)", "ops/_composed/test_mamba3.py", "several"),
    Break("ops/_recurrences/elementwise/cumulative_angle/eager.py", "known.where(known.isfinite(), 0)", "known", PACKED, "neighbours and mamba3"),
    Break("ops/_recurrences/elementwise/cumulative_angle/eager.py", "cumsum(2, dtype=torch.float64)", "cumsum(2, dtype=x.dtype)", "ops/_composed/test_mamba3.py", "long_row"),
    Break("ops/_recurrences/elementwise/cumulative_angle/eager.py", "running(within[:, :, -1])[:, :-1]", "running(within[:, :, -1])[:, 1:]", "ops/_composed/test_mamba3.py", "sums_of_angles"),
    Break("ops/_recurrences/elementwise/cumulative_angle/eager.py", "(1 - speed.square())", "1", "ops/_recurrences/elementwise/test_cumulative_angle.py"),
    Break("ops/_recurrences/elementwise/cumulative_angle/kernels.py", "tl.where(tl.abs(x) < 0.625, series", "tl.where(tl.abs(x) < 0.0, series", "ops/_recurrences/elementwise/test_cumulative_angle_kernels.py"),
    Break("ops/_recurrences/elementwise/cumulative_angle/kernels.py", "total -= 2 * tl.floor(0.5 * total + 0.5)", "total -= 0", "ops/_recurrences/elementwise/test_cumulative_angle_kernels.py"),
    Break("ops/_recurrences/fused/rotary/eager.py", "place = torch.where(filled, cu[1:] - 1, T)", "place = cu[1:] - 1", "ops/_recurrences/fused/test_rotary.py"),
    Break("ops/_recurrences/fused/rotary/eager.py", "(a * db - b * da)", "(b * da - a * db)", "ops/_recurrences/fused/test_rotary.py"),
    Break("ops/_recurrences/fused/rotary/kernels.py", "exists & (t + 1 < end), exists & (t + 1 == end)\n    of_group", "exists, exists & (t + 1 == end)\n    of_group", "ops/_recurrences/fused/test_rotary_kernels.py"),
    Break("ops/_recurrences/fused/rotary/kernels.py", "of_k = tl.load(at_products + s * R + r", "of_k = tl.load(at_products + r * R + s", "ops/_recurrences/fused/test_rotary_kernels.py"),
    Break("ops/_recurrences/fused/rotary/kernels.py", "tl.where(odd, s, c), tl.where(odd, c, s)", "c, s", "ops/_recurrences/fused/test_rotary_kernels.py"),
    Break("ops/_composed/mamba3.py", "token_shift(x, before, lengths, cu_seqlens, num_states)", "token_shift(x, before, None, cu_seqlens, num_states)", "layers/test_laws.py", "padding and mamba3"),
    Break("ops/ssd.py", "initial_states = initial_states.mT", "initial_states = initial_states + 0", "ops/_recurrences/fused/test_ssd.py"),
    Break("ops/_arguments/require.py", "isinstance(x, bool) or not isinstance(x, (Real, torch.SymInt, torch.SymFloat))", "False", "contract/test_errors.py", "scale"),
    Break("ops/_arguments/large_heads.py", "state is not None and state.ndim == 4", "False", "layers/test_wide.py"),
    # What PyTorch is told of the operators
    Break("ops/_operators/signature.py", "tuple(map(_contiguous, function(", "tuple(iter(function(", "contract/test_pure.py", "fakes"),
    Break("ops/_operators/signature.py", "_contiguous(made[x])", "made[x]", "contract/test_pure.py", "fakes"),
    Break("ops/_operators/derivatives.py", "(distributed or ctx.needs_input_grad[i])", "True", "contract/test_pure.py", "not_wanted"),
    Break("ops/_operators/derivatives.py", "x.dtype is not torch.float64 and ", "", "contract/test_transforms.py", "keeps_float64"),
    Break("ops/_operators/derivatives.py", "(size, y.shape[dim] // size)", "(y.shape[dim] // size, size)", "contract/test_transforms.py", "vmap and chunk_gla"),
    Break("ops/_operators/sharding.py", "Replicate() if name == primal else Partial()", "Replicate()", "contract/test_dtensor.py"),
    Break("ops/_recurrences/matrix/op.py", "return 2 * products * B", "return products * B", "contract/test_transforms.py", "flops and chunk_gla"),
    # Launches
    Break("ops/_launch/replay.py", "if first else self.record(kind, args)", "", "ops/_launch/test_replay.py"),
    Break("ops/_launch/warm_up.py", "*map(int.bit_length, x.shape)", "0", "ops/_launch/test_warm_up.py", "another"),
    Break("ops/_launch/warm_up.py", "_persistent(partial(kernel.warmup, *args, grid=grid, **kwargs))", "kernel.warmup(*args, grid=grid, **kwargs)", "ops/_launch/test_warm_up.py", "tried_again"),
    Break("ops/_recurrences/matrix/head_decay/eager.py", "x.to(chunks.dtype) for x in (g, g_gamma)", "x for x in (g, g_gamma)", "ops/_recurrences/matrix/test_simple_gla.py", "gates_add"),
    Break("ops/_arguments/require.py", "return f\": {q_name} has {T} tokens\"", "return \"\"", "contract/test_errors.py", "other_layouts"),
    Break("ops/_launch/warm_up.py", "hint = x.node.hint", "hint = 2", "ops/_launch/test_warm_up.py", "begun"),
    Break("ops/_launch/warm_up.py", "launching_by(compile_only), _SumsOfMetaTensors()", "launching_by(compile_only)", "ops/_launch/test_warm_up.py", "sympy"),
    Break("ops/_recurrences/matrix/low_rank/cuda.py", "x.new_empty(x.shape) if tokens.bfloat16", "torch.empty_like(x) if tokens.bfloat16", "ops/_launch/test_warm_up.py", "sympy"),
    Break("ops/_launch/warm_up.py", " and args[0].is_floating_point()", "", "ops/_launch/test_warm_up.py", "sympy"),
    Break("ops/_launch/warm_up.py", "{range(x.dim())[axis] for axis", "{axis for axis", "ops/_launch/test_warm_up.py", "sympy"),
    Break("ops/_launch/hopper.py", "<= NEWEST_TRITON", "!= NEWEST_TRITON", "ops/_recurrences/test_launches.py", "newer"),
    Break("ops/_launch/warm_up.py", "differentiated, device, *map(_kind, args)", "differentiated, device", "ops/_launch/test_warm_up.py"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "tile_count(V, 64) <= 128", "tile_count(V, 64) <= 64", "ops/_recurrences/test_fit.py", "tuned"),
    Break("ops/_launch/sequences.py", "self.chunks_of_row + self.N", "self.chunks_of_row", KERNELS, "test_packed and chunk_gla"),
    Break("ops/_launch/operands.py", "return (D + B - 1) // B", "return max(D // B, 1)", KERNELS, "head_sizes and chunk_simple_gla"),
    # The kernels
    Break("ops/_recurrences/elementwise/rg_lru/eager.py", "self.root = torch.where(self.kept, square, 1).sqrt()", "self.root = square.sqrt()", "ops/_recurrences/elementwise/test_rg_lru.py", "second_derivatives"),
    Break("ops/_recurrences/elementwise/rg_lru/eager.py", "self.g = torch.where(self.reset, -inf, self.g)", "pass", "ops/_recurrences/elementwise/test_rg_lru.py", "test_resets"),
    Break("ops/_recurrences/elementwise/scan/kernels.py", "tl.where(g > -0.05, -expm1_near_0(2 * g), 1 - a * a)", "1 - a * a", "ops/_recurrences/elementwise/test_rg_lru_kernels.py", "any_size"),
    Break("ops/_recurrences/elementwise/scan/kernels.py", "(row + chunk) * D + d, h, mask=in_d", "(row + chunk) * D + d, h * 0, mask=in_d", "ops/_recurrences/elementwise/test_rg_lru_kernels.py", "lengths"),
    Break("ops/_recurrences/elementwise/scan/kernels.py", "first * H + d // (D // H)", "first * H + d * 0", "ops/_recurrences/elementwise/test_rg_lru_kernels.py", "groups"),
    Break("ops/_recurrences/elementwise/scan/kernels.py", "tl.where(strength > 0.0, a_ * a_ * u_ * by_strength, 0.0)", "0.0", "ops/_recurrences/elementwise/test_rg_lru_kernels.py", "packed"),
    Break("ops/_parallel/form.py", "for name in inputs._fields:", "for name in signature.differentiable:", SHARED, "test_ranks"),
    Break("ops/_recurrences/elementwise/rwkv4/eager.py", "top = torch.maximum(past, now)", "top = past", "ops/_recurrences/elementwise/test_rwkv4.py"),
    Break("ops/_recurrences/elementwise/rwkv4/eager.py", "torch.where(wkv.exists[j], step.kept * (da * step.a + db * step.b), 0)", "step.kept * (da * step.a + db * step.b)", "ops/_recurrences/elementwise/test_rwkv4.py", "operator"),
    Break("ops/_recurrences/elementwise/rwkv4/op.py", "torch.stack(x)[ranks.rank] for x in zip(*states, strict=True)", "x for x in states[ranks.rank]", "integrations/test_context_parallel.py"),
    Break("ops/_recurrences/elementwise/rwkv4/kernels.py", "tl.where(b_ == 0.0, LOWEST, tl.maximum(_load(m, at, in_d), LOWEST))", "tl.maximum(_load(m, at, in_d), LOWEST)", "ops/_recurrences/elementwise/test_rwkv4_kernels.py", "lowest"),
    Break("ops/_recurrences/elementwise/rwkv4/kernels.py", "tl.where(k_ < LOWEST, LOWEST, k_)", "k_", "ops/_recurrences/elementwise/test_rwkv4_kernels.py", "lowest"),
    Break("ops/_recurrences/elementwise/rwkv4/op.py", "eager.join(states[-1]", "eager.join(states[0]", SHARED, "ranks and 2"),
    Break("ops/_recurrences/elementwise/rwkv4/kernels.py", "tl.where(b > 0, m, LOWEST), u + k", "m, u + k", "ops/_recurrences/elementwise/test_rwkv4_kernels.py", "decayed"),
    Break("ops/_recurrences/elementwise/rwkv4/kernels.py", "after = tl.maximum(m_ + tokens * w_, own_m)", "after = tl.maximum(m_, own_m)", "ops/_recurrences/elementwise/test_rwkv4_kernels.py", "segments"),
    Break("ops/_recurrences/elementwise/rwkv4/kernels.py", "tl.fma(tl.minimum(j + 1, left).to(tl.float32), w, begun_m), own)", "m + decay, own)", "ops/_recurrences/elementwise/test_rwkv4_kernels.py", "roundings"),
    Break("ops/_recurrences/elementwise/rwkv4/kernels.py", "tl.where(j < left, tl.fma(kept, tl.fma(da, as_[j], db * bs[j]), dw_), dw_)", "tl.fma(kept, tl.fma(da, as_[j], db * bs[j]), dw_)", "ops/_recurrences/test_kernels.py", "rwkv4"),
    Break("ops/_recurrences/elementwise/rwkv4/kernels.py", "tl.fma(of_presents[j], errors[j], du_)", "of_presents[j] * errors[j]", "ops/_recurrences/test_kernels.py", "rwkv4"),
    Break("ops/_recurrences/elementwise/rwkv4/kernels.py", "d_past = left_over * past *", "d_past = past *", "ops/_recurrences/elementwise/test_rwkv4_kernels.py", "segments"),
    Break("ops/_recurrences/elementwise/rwkv4/kernels.py", "a, b = decayed(begun_a, total) + added_a, decayed(begun_b, total) + added_b", "a, b = added_a, added_b", "ops/_recurrences/elementwise/test_rwkv4_kernels.py", "lengths"),
    Break("ops/_recurrences/elementwise/scan/kernels.py", "initial + at_end", "initial + n * D + d", KERNELS, "test_segments and hgrn"),
    Break("ops/_recurrences/matrix/head_decay/kernels.py", "high_before = tl.load(sums + at - 1,", "high_before = tl.load(sums + at,", KERNELS, "several_blocks and simple_gla-g"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "Y = tl.where(s == t, 1.0, 0.0) - ", "Y = tl.where(s == t, 1.0, 0.0) + ", KERNELS, "dense and delta_rule"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "begin + i if REVERSE else stop - 1 - i", "begin + i", KERNELS, "states_that_decay"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "starts |= is_zero & (i < turn)", "starts |= i < turn", KERNELS, "to_zero or warm_starts"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "tl.where(is_zero & (i >= turn), tl.minimum(last, i), last)", "last", KERNELS, "to_zero or warm_starts"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "begin if REVERSE else tl.maximum(begin, stop - CHUNKS_EXAMINED)", "begin", KERNELS, "last_chunks_are_examined"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "tiles = 1 if takes_inverses", "tiles = 2 if takes_inverses", "ops/_recurrences/test_launches.py", "few_rows_have_warm_starts"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_gradients.py", "gl.where(s[None, :] < t[:, None], product(pairs, weights * scale), 0.0)", "product(pairs, gl.where(s[None, :] < t[:, None], weights * scale, 0.0))", GLUON, "overflow"),
    Break("ops/_recurrences/matrix/delta_rule/hopper/head_backward.py", "gl.where(s < t, product(pairs, weights * scale), 0.0)", "product(pairs, gl.where(s < t, weights * scale, 0.0))", GLUON, "overflow"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "is_kept = is_head & (", "is_kept = (heads == 0) & (", KERNELS, "nan_in_a_state"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "stop = tl.where(starts, stop, begin)", "pass", KERNELS, "to_zero or warm_starts"),
    Break("ops/_recurrences/matrix/delta_rule/launch_state_passing.py", "_fill(states[0], x.initial)", "_fill(states[0], None)", KERNELS, "to_zero or warm_starts"),
    Break("ops/_recurrences/matrix/delta_rule/launch_state_passing.py", "PassedStates(_starts(x), states)", "PassedStates(x.initial, states)", KERNELS, "both_directions"),
    Break("ops/_recurrences/matrix/delta_rule/cuda.py", "alone=not at_once", "alone=True", "ops/_recurrences/test_launches.py", "both_directions"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "of_values[\"BV\"] >= V == K", "V == K", "ops/_recurrences/test_launches.py", "both_directions"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "reads_all and tokens.cu_seqlens is None and", "reads_all and", "ops/_recurrences/test_launches.py", "both_directions"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", "states * tile_count(V, 64) <= 128", "states <= 128", "ops/_recurrences/test_launches.py", "both_directions"),
    Break("ops/_recurrences/matrix/delta_rule/plan.py", " and form != \"ends\":", ":", "ops/_parallel/test_transitions_kernels.py", "test_ends"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "1.0 - beta_i * k_squared", "1.0 - k_squared", "ops/_parallel/test_transitions_kernels.py", "log_norm"),
    Break("ops/_recurrences/matrix/gates_of_heads.py", "sums + i - 1, mask=i > 0", "sums + i, mask=i > 0", KERNELS, "dense and comba and not comba-after"),
    Break("ops/_recurrences/matrix/gates_of_heads.py", "mask=i > 0, other=0.0", "mask=i >= 0", KERNELS, "dense and comba and not comba-after"),
    Break("ops/_recurrences/matrix/delta_rule/head_gradients.py", "ending += _of_next(tl.sum(dk_read * a_, 1))", "ending += tl.sum(dk_read * a_, 1)", KERNELS, "dense and comba and not comba-after"),
    Break("ops/_recurrences/matrix/delta_rule/head_gradients.py", "s == t - 1, 0.0, pairs", "s == t - 1, pairs, pairs", KERNELS, "dense and comba and not comba-after"),
    Break("ops/_recurrences/matrix/delta_rule/head_gradients.py", "written += by_next", "written += 0 * by_next", KERNELS, "dense and comba and not comba-after"),
    Break("ops/_tiles/blocks.py", "or DELTA_RULE):", "or False):", KERNELS, "dense and fused_recurrent_comba"),
    Break("ops/_recurrences/matrix/delta_rule/kernels.py", "r_ = read_by_k + dot(", "r_ = dot(", KERNELS, "dense and dplr"),
    Break("ops/_recurrences/matrix/low_rank/kernels.py", "sums = sums - tl.where(by_a", "sums = sums - 0 * tl.where(by_a", KERNELS, "dense and dplr"),
    Break("ops/_recurrences/matrix/low_rank/gradients.py", "d_gates -= d_read_a", "d_gates -= 0 * d_read_a", KERNELS, "dense and dplr"),
    Break("ops/_recurrences/matrix/low_rank/gradients.py", "select(reads_gate(s, t, READ_BEFORE), a_", "select(reads_gate(s, t, False), a_", KERNELS, "dplr and dense"),
    Break("ops/_recurrences/matrix/low_rank/cuda.py", "H, K, dtype=torch.float32, device", "H, K, device", "ops/_recurrences/test_launches.py", "dtype_of_its_own"),
    Break("ops/_tiles/join.py", "gate += tl.load(gk", "gate += 0 * tl.load(gk", KERNELS, "test_segments and chunk_gla"),
    Break("ops/_recurrences/elementwise/selective_scan/eager.py", 'without_tail(inputs.cu_seqlens, found["x"] + skipped)[0]', 'found["x"] + skipped', "ops/_recurrences/elementwise/test_selective_scan.py", "a_tail_is"),
    Break("ops/_recurrences/elementwise/selective_scan/kernels.py", "at_state = d[None, :] * S + s[:, None]", "at_state = d[None, :] + s[:, None]", "ops/_recurrences/elementwise/test_selective_scan_kernels.py"),
    Break("ops/_recurrences/elementwise/selective_scan/kernels.py", "TOKENS - 1 - t, TOKENS - 1 - column", "TOKENS - 1 - t, column", "ops/_recurrences/elementwise/test_selective_scan_kernels.py", "segments"),
    Break("ops/_recurrences/elementwise/selective_scan/kernels.py", "tl.maximum(chunk - 1, 0) * CHUNK", "chunk * CHUNK", "ops/_recurrences/elementwise/test_selective_scan_kernels.py", "lengths"),
    Break("ops/_recurrences/elementwise/selective_scan/kernels.py", "dz_ = do_ * y_ * open_ * (1 + z_ * (1 - open_))", "dz_ = do_ * y_ * open_", "ops/_recurrences/elementwise/test_selective_scan_kernels.py", "gate"),
    Break("ops/_recurrences/elementwise/selective_scan/kernels.py", "-expm1_near_0(-delta), 1 - tl.exp2(delta * -LOG2_E)", "1.0, 1.0", "ops/_recurrences/elementwise/test_selective_scan_kernels.py", "gate"),
    Break("ops/_recurrences/elementwise/selective_scan/eager.py", "do * y * opened * (1 + z * (1 - opened))", "do * y * opened", "ops/_recurrences/elementwise/test_selective_scan.py", "gradients"),
    Break("ops/_recurrences/fused/slot_attention/kernels.py", "tl.maximum(before, tl.max(logits, 0))", "tl.max(logits, 0)", "ops/_recurrences/fused/test_slot_attention_kernels.py"),
    Break("ops/_recurrences/short_conv/kernels.py", "y += b * T * D", "y += b * D", "ops/_recurrences/short_conv/test_causal_conv1d_kernels.py"),
    Break("ops/_recurrences/short_conv/cuda.py", " and _holds(initial_state, x)", "", "ops/_recurrences/test_update_kernels.py"),
    # Layers and models
    Break("ops/ssd.py", "if not fits(x):", "if False:", "ops/_recurrences/fused/test_ssd.py", "any_size_in_the_layer"),
    Break("layers/layout.py", "if is_compiling() and x.ndim > 2", "if x.ndim > 2", "layers/test_laws.py", "hooks_see_tokens and rwkv6"),
    Break("layers/layout.py", "rows.view(*like.shape[:2]", "rows.view(*like.shape[1::-1]", "layers/test_laws.py", "compiled_layouts"),
    Break("layers/mamba2.py", "x.dtype == torch.float16", "False", "layers/test_mamba2.py", "float16"),
    Break("layers/mamba2.py", ".clamp(max=80.0)", "", "layers/test_mamba2.py", "overflow"),
    Break("layers/mamba2.py", "None if gated_after or gated_here else in", "None if gated_here else in", "layers/test_mamba2.py", "before_its_gate"),
    Break("layers/short_conv.py", "torch.cat(states, 1) if", "torch.cat(states[::-1], 1) if", "layers/test_short_conv.py", "the_op"),
    Break("layers/short_conv.py", "state.split(sizes, 1)", "[x * 0 for x in state.split(sizes, 1)]", "layers/test_short_conv.py", "the_op"),
    Break("layers/short_conv.py", "is_compiling() and not torch.is_grad_enabled()", "False", "layers/test_short_conv.py", "takes_the_op"),
    Break("layers/short_conv.py", "op.has_kernel(x.dtype, self.kernel_size)", "True", "layers/test_short_conv.py", "takes_the_op"),
    Break("layers/short_conv.py", "[state[:, :, 1:], x", "[state[:, :, :-1], x", "layers/test_short_conv.py"),
    Break("ops/_tensors/packed.py", "torch.where(is_first, own, torch.cat([first, x], 1)", "torch.where(is_first, own, torch.cat([x, first], 1)", "layers/test_laws.py", "packed and rwkv6 and not compiled and not export"),
    Break("layers/rotary.py", "if start is None else start.long()", "if True else start.long()", "layers/test_laws.py", "retention and not compiled and not export"),
    Break("layers/rwkv6.py", "rows_of(before - x)", "rows_of(x - before)", "layers/test_laws.py", "test_values and rwkv6"),
    Break("layers/rwkv7.py", "(v + (first - v) * share)", "(first + (v - first) * share)", "layers/test_laws.py", "test_values and RWKV7"),
    Break("layers/mlstm.py", "tokens.masked(f, torch.inf)", "f", "layers/test_laws.py", "test_padding and mlstm"),
    Break("layers/rwkv7.py", "eta = eta * (1 + w.exp())", "eta = eta * 2", "layers/test_rwkv7.py", "eigenvalues"),
    Break("layers/rwkv7.py", "tokens.masked(tokens_of(b, x))", "tokens_of(b, x)", "layers/test_laws.py", "test_padding and rwkv7"),
    Break("layers/griffin.py", "first = first & tokens.is_token", "pass", "layers/test_laws.py", "test_padding and griffin"),
    Break("layers/gdn2.py", "tokens.masked(k)", "k", "layers/test_laws.py", "test_padding and gdn2"),
    Break("layers/delta_layer.py", "2 * gate if", "gate if", "layers/test_laws.py", "test_values and GatedDeltaNet2"),
    Break("layers/rodimus.py", "x < -20, low - low.exp() / 2", "x < -200, low - low.exp() / 2", "layers/test_rodimus.py", "softplus"),
    Break("layers/rodimus.py", "upcast(s) * self.residual_weight", "upcast(u) * self.residual_weight", "layers/test_laws.py", "test_values and Rodimus"),
    Break("layers/weighted_mean.py", "tokens.masked(self.feature_map(k))", "self.feature_map(k)", "layers/test_laws.py", "test_padding and based"),
    Break("layers/weighted_mean.py", "o[..., -1:] + self.eps", "o[..., -1:] + 1e-9", "layers/test_laws.py", "test_values and Based"),
    Break("layers/feature_map.py", "products * 2**0.5", "products * 2", "layers/test_laws.py", "test_values and ReBased"),
    Break("layers/feature_map.py", "squares * 0.5**0.5", "squares", "layers/test_laws.py", "test_values and BasedLinear"),
    Break("models/config.py", "if name in known}", "}", "models/test_recurrent_lm.py", "arguments"),
    Break("layers/hgrn.py", "self.convolutions[::-1]", "self.convolutions", "layers/test_laws.py", "test_values and HGRN"),
    Break("layers/fused_projections.py", "split(self.joint_proj(x), self.joint_sizes, -1)", "split(self.joint_proj(x), self.joint_sizes[::-1], -1)", "layers/test_fused_projections.py", "same_results"),
    Break("layers/forget_gate.py", "lower_bound is None or self.is_first", "lower_bound is None or self.layer_idx == 0", "models/test_recurrent_lm.py", "share_a_graph"),
    Break("layers/rwkv7.py", "shared = None if self.is_first", "shared = None if self.layer_idx == 0", "models/test_recurrent_lm.py", "share_a_graph"),
    Break("layers/forget_gate.py", "f = bound + (1 - bound) * sigmoid", "f = bound + sigmoid", "layers/test_hgrn.py"),
    Break("layers/norm.py", "x.shape[-1:], None, None, self.eps)", "x.shape[-1:], None, None, 1e-2)", "layers"),
    Break("models/sampling.py", "logits < least", "logits <= least", "models/test_recurrent_lm.py"),
    Break("models/speculative.py", "complete = count >= wanted", "complete = count > wanted", "models/test_speculative.py"),
    Break("models/recurrent_lm.py", "layer.state_shapes is shapes", "True", "models/test_recurrent_lm.py", "errors"),
    Break("models/recurrent_lm.py", 'options["layer_idx"] = 0', 'options["layer_idx"] += 0', "models/test_recurrent_lm.py", "beside"),
    Break("models/feed_forward.py", "y = F.silu(y)", "y = F.sigmoid(y)", "models/test_fla.py"),
    Break("models/softmax_attention.py", "first = past.position is None", "first = True", "models/test_recurrent_lm.py", "hybrid or attn or attention or softmax"),
    Break("models/softmax_attention.py", "(query_sequence[:, None] == key_sequence) & (age >= 0)", "age >= 0", "models/test_recurrent_lm.py", "hybrid_are_rows"),
    Break("models/softmax_attention.py", "self.window_size - 1, 0)", "self.window_size, 0)", "models/test_recurrent_lm.py", "flash"),
    Break("models/recurrent_lm.py", "if gradient_checkpointing and", "if False and", "models/test_recurrent_lm.py", "gradient_checkpointing"),
    Break("models/hub_mixin.py", "x.to(dtypes.get(name))", "x", "models/test_hub.py", "folder"),
    # Other libraries
    Break("integrations/modeling/delta_rule.py", "if exact and ", "if ", "integrations/test_modeling.py", "stacked"),
    Break("integrations/transformers.py", "del module.fusible, module.joint_sizes", "pass", "integrations/test_transformers.py", "joined_projections and qwen3_next"),
    Break("integrations/modeling/convolution.py", "bias, before, None, fused", "bias, None, None, fused", "integrations/test_transformers.py", "test_generation"),
    Break("integrations/modeling/rwkv.py", "k = k.masked_fill(pads", "k.masked_fill(pads", "integrations/test_transformers.py", "rwkv and continued"),
    Break("integrations/modeling/zaya.py", "x.masked_fill(ends[:, None], 0)", "x", "integrations/test_transformers.py", "zaya and packed"),
    Break("integrations/modeling/xlstm.py", "f.masked_fill(pads, torch.inf)", "f", "integrations/test_transformers.py", "pads_in_between"),
    Break("integrations/modeling/mamba.py", "mask = mask[:, -T:]", "mask = mask[:, :T]", "integrations/test_transformers.py", "continued and mamba"),
    Break("integrations/modeling/falcon_h1.py", "y = layer.norm(y, z) if layer.mamba_rms_norm else y", "pass", "integrations/test_transformers.py", "limited"),
    Break("integrations/modeling/mamba2.py", 'kwargs["dt_limit"] = layer.time_step_limit', "pass", "integrations/test_transformers.py", "limited"),
    Break("integrations/fla.py", '_NORM_EPS = {"norm_eps": 1e-5}', '_NORM_EPS = {"norm_eps": 1e-1}', "models/test_fla.py"),
    Break("integrations/transformers.py", "return kind.__mro__[1]", "return kind", "integrations/test_transformers.py", "accelerate"),
    # Tokens of several ranks
    Break("ops/_parallel/ranks.py", "lengths[: ranks.rank].sum()", "lengths[: ranks.rank + 1].sum()", COMPOSED, "data_parallel"),
    Break("ops/_parallel/ranks.py", "grads[0], -1)", "grads[0], 0)", COMPOSED, "heads_and_tokens"),
    Break("ops/_tensors/dtensor.py", "[*y.shape[:2], *x.shape[2:]]", "y.shape", COMPOSED, "heads_and_tokens"),
    Break("ops/_parallel/exchange.py", "state.unsqueeze(1), 0).sum(2) + windows[rank]", "state.unsqueeze(1), 0).sum(2) * 0 + windows[rank]", SHARED, "ranks and 2"),
    Break("ops/_parallel/exchange.py", "(column >= 0) & (column < ctx.W)", "column >= 0", SHARED, "ranks and 2"),
    Break("ops/_parallel/form.py", "d_final, reverse=True", "d_final, reverse=False", SHARED, "ranks and 2"),
    Break("ops/_parallel/form.py", "torch.stack([x for _, x in found]).sum(0)", "found[0][1]", SHARED, "ranks and 2"),
    Break("ops/_parallel/form.py", "d_initial if ranks.rank == 0 else", "d_initial if True else", SHARED, "ranks and 2"),
    Break("ops/_parallel/form.py", "x.view_as(x) if twice", "x if twice", COMPOSED, "compiled"),
    Break("distributed/context_parallel.py", "if state.shape[:1] != (N,):", "if False:", COMPOSED, "misuse"),
    Break("layers/recurrent.py", "# Raise errors here, before the ranks wait for each other.\n", "bounds_of_rank(self.ranks, cu_seqlens, hidden_states.shape[1])\n", COMPOSED, "misuse"),
    Break("models/states_in_place.py", "name != \"states_final\"", "name != \"final\"", "models/test_decoder.py", "write_states"),
    Break("ops/_launch/flat.py", "copy.copy_of = kernel", "pass", "models/test_decoder.py", "write_states"),
    Break("ops/_recurrences/matrix/cuda.py", "    scheme(inputs)  # refuses", "    # refuses", "ops/_recurrences/matrix/test_linear_recurrence.py", "ignores"),
    Break("ops/_recurrences/matrix/eager.py", "    rule = SCHEMES[scheme(inputs)]\n", "    rule = SCHEMES[scheme(inputs)] if inputs.q.shape[1] > 1 else CacheBlock\n", "ops/_recurrences/matrix/test_linear_recurrence.py", "ignores"),
    Break("ops/_recurrences/matrix/delta_rule/operands.py", "        raise TypeError(f\"{', '.join(step.kernel", "        TypeError(f\"{', '.join(step.kernel", "ops/_recurrences/test_launches.py", "no_others"),
    Break("distributed/tensor_parallel.py", '_FROM_HEADS = ("o_proj", ', "_FROM_HEADS = (", "distributed", "heads_are_shared"),
]  # fmt: skip


def is_seen(broken: Break, copy: Path) -> str:
    """ "red" if a test fails in the copy with this break, else what is wrong."""
    path = copy / "flacompose" / broken.path
    text = path.read_text()
    if text.count(broken.line) != 1:
        return f"its line is there {text.count(broken.line)} times"
    path.write_text(text.replace(broken.line, broken.broken))
    interpreted = {"TRITON_INTERPRET": "1"} if broken.tests.endswith("_kernels.py") else {}
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"} | interpreted
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{broken.tests}"]
    command += ["-k", broken.select] if broken.select else []
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return "no end after 900 s"
    finally:
        path.write_text(text)
    if done.returncode == 1 or done.returncode < 0:  # a kernel that leaves its memory may end the process
        return "red"
    return f"NOT SEEN: {(done.stdout.splitlines() or [''])[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the checkout that is copied (default: this one)"
    )
    parser.add_argument("--only", default="", help="a part of the path or of the tests of a break")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    chosen = [x for x in BREAKS if args.only in f"{x.path} {x.tests}"]
    copies: SimpleQueue[Path] = SimpleQueue()

    def outcome(broken: Break) -> str:
        copy = copies.get()
        try:
            return is_seen(broken, copy)
        finally:
            copies.put(copy)

    unseen = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.processes) as pool:
        for i in range(args.processes):
            copies.put(Path(folder, str(i)))
            for part in ("flacompose", "tests", "benchmarks", "examples", "docs"):
                shutil.copytree(args.root / part, Path(folder, str(i), part))
            for file in ("pyproject.toml", "README.md"):
                shutil.copy(args.root / file, Path(folder, str(i)))
        for broken, result in zip(chosen, pool.map(outcome, chosen), strict=True):
            unseen += result != "red"
            print(f"{broken.path}: {broken.line!r} -> {broken.broken!r}: {result}", flush=True)
    print(f"{len(chosen)} breaks, {unseen} not seen")
    return int(unseen > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
