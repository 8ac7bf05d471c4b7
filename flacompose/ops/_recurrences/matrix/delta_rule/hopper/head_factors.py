"""WY factors with gates of heads on Hopper, in Gluon: bfloat16, heads of 64 and 128 keys.

The kernels invert ``I + U``, with `U` above the diagonal, from small blocks to large ones, like `inverse` of
`kernels`. But blocks of 16 tokens are solved by substitution, and combined to blocks of 32, both in float32:
a thread has columns of the inverse in its registers, and reads the other operands from shared memory. Only
the last step uses products in parts on tensor cores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flacompose.ops._recurrences.matrix import gates_of_heads
from flacompose.ops._tiles.hopper import (
    copy,
    make_visible,
    parts,
    reinterpret,
    store,
    store_parts,
    tile_of_program,
    wait_for_copies,
)

sums_before = gluon.jit(gates_of_heads.sums_before.fn)

B = gl.constexpr(16)  # tokens of a block that is solved by substitution
ROWS_PER_THREAD = gl.constexpr(16)  # rows of a column of its inverse that one thread has


@gluon.constexpr_function
def products(width):
    """The layout of results of tensor cores, 64 rows of `width` numbers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def _solve_blocks(blocks):
    """The inverses of ``I + blocks [2, 2, 16, 16]`` in shared memory, from the last row to the first."""
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, ROWS_PER_THREAD, 1],
        [1, 1, B // ROWS_PER_THREAD, 32 * ROWS_PER_THREAD // B],
        [2, 2, 1, 1],
        [3, 2, 1, 0],
    )
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    s = gl.arange(0, B, ROW)[None, None, :, None]
    t = gl.arange(0, B, COLUMN)[None, None, None, :]
    Y = gl.where(s == t, 1.0, 0.0) + gl.zeros([2, 2, B, B], gl.float32, L)
    for i in gl.static_range(B - 2, -1, -1):
        row = blocks.slice(i, 1, 2).permute((0, 1, 3, 2)).load(L)
        Y = gl.where(s == i, Y - gl.expand_dims(gl.sum(row * Y, 2), 2), Y)
    return Y


@gluon.jit
def _multiply_blocks(x, y):
    """``x @ y`` for ``[..., 16, 16]`` in float32."""
    return gl.sum(gl.expand_dims(x, 4) * gl.expand_dims(y, 2), 3)


@gluon.jit
def halves(x):
    """The columns of ``x``, first half and second, without moves between threads."""
    C: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1] // 2
    left, right = gl.split(gl.permute(gl.reshape(x, [C, 2, D]), (0, 2, 1)))
    L: gl.constexpr = products(D)
    return gl.convert_layout(left, L, assert_trivial=True), gl.convert_layout(right, L, assert_trivial=True)


@gluon.jit
def joined(left, right):
    """The inverse of `halves`."""
    C: gl.constexpr = left.shape[0]
    D: gl.constexpr = left.shape[1] * 2
    x = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [C, D])
    return gl.convert_layout(x, products(D), assert_trivial=True)


@gluon.jit
def _in_second(x):
    """Whether each row is in the second of two diagonal blocks, as wide as `x`, of a larger block."""
    s = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]
    return (s // x.shape[1]) % 2 == 1


@gluon.jit
def rows(x, first: gl.constexpr, count: gl.constexpr):
    """Rows of both parts that `store_parts` has stored."""
    return x.index(0).slice(first, count), x.index(1).slice(first, count)


@gluon.jit
def left_parts(x, OUT: gl.constexpr):
    """Both parts of float32 `x`, in the layout of left operands of products with the layout `OUT`."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    high, low = parts(x)
    return gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT)


@gluon.jit
def begin_product(x, y, acc):
    """Begin ``acc + x @ y`` for `x` from `left_parts`, and `y` in shared memory, two parts or one.

    The product of both smaller parts is omitted.
    """
    high, low = x
    acc = warpgroup_mma(low, y[0], acc, is_async=True)
    if len(y) == 2:
        acc = warpgroup_mma(high, y[1], acc, is_async=True)
    return warpgroup_mma(high, y[0], acc, is_async=True)


@gluon.jit
def multiply(x, y, acc):
    """``acc + x @ y`` for float32 `x`, in two parts, and `y` as in `begin_product`."""
    OUT: gl.constexpr = acc.type.layout
    return warpgroup_mma_wait(0, [begin_product(left_parts(x, OUT), y, acc)])


@gluon.jit
def inverse(upper):
    """``(I + upper)^-1``, where `upper` is zero on and below the diagonal."""
    C: gl.constexpr = upper.shape[0]
    D: gl.constexpr = C // 2
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, D], gl.bfloat16)
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    # 1. Blocks of 16 tokens, `own`, and the blocks `beside` them in blocks of 32.
    left, right = halves(upper)
    beyond = gl.allocate_shared_memory(gl.bfloat16, [2, C, D], HALF)
    store_parts(beyond, right)
    make_visible()
    left, right = halves(gl.where(_in_second(left), right, left))
    own = gl.allocate_shared_memory(gl.float32, [C // D, D // B, B, B], BLOCKS)
    beside = gl.allocate_shared_memory(gl.float32, [C // D, D // B, B, B], BLOCKS)
    own.store(gl.reshape(gl.where(_in_second(left), right, left), own.shape))
    beside.store(gl.reshape(right, own.shape))
    own.store(_solve_blocks(own))
    # 2. Blocks of 32.
    ALL: gl.constexpr = gl.BlockedLayout([1, 1, 4, B, 1], [1, 1, 2, 1, 16], [2, 1, 2, 1, 1], [4, 3, 2, 1, 0])
    LEFT: gl.constexpr = gl.SliceLayout(4, ALL)
    RIGHT: gl.constexpr = gl.SliceLayout(2, ALL)
    beside_ = beside.slice(0, 1, 1)
    read = _multiply_blocks(own.slice(0, 1, 1).load(LEFT), beside_.load(RIGHT))
    made = _multiply_blocks(gl.convert_layout(read, LEFT), own.slice(1, 1, 1).load(RIGHT))
    beside_.store(-made)
    BLOCK: gl.constexpr = left.type.layout
    own_ = reinterpret(own, gl.float32, [C, B], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).load(BLOCK)
    made = reinterpret(beside, gl.float32, [C, B], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).load(BLOCK)
    second = _in_second(own_)
    Y = joined(gl.where(second, 0.0, own_), gl.where(second, own_, made))
    # 3. All.
    second = _in_second(Y)
    left, right = gl.where(second, 0.0, Y), gl.where(second, Y, 0.0)
    right_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, D], HALF)
    store_parts(right_s, right)
    make_visible()
    read = multiply(left, rows(beyond, 0, D), gl.zeros([C, D], gl.float32, products(D)))
    right = multiply(-read, rows(right_s, D, D), right)
    return joined(left, right)


@gluon.jit
def _store_log_norm(log_norm, ak, beta_s, total):
    """Stores the log-norm bound of a chunk's transition matrix, from the products of its keys."""
    C: gl.constexpr = ak.shape[0]
    s = gl.arange(0, C, gl.SliceLayout(1, ak.type.layout))[:, None]
    t = gl.arange(0, C, gl.SliceLayout(0, ak.type.layout))[None, :]
    # A token multiplies a state by exp(g) (I - beta k k^T), whose norm is exp(g) max(1, |1 - beta k . k|).
    along_key = gl.abs(1.0 - beta_s * gl.sum(gl.where(s == t, ak, 0.0), 1))
    gl.store(log_norm, total + gl.sum(gl.log2(gl.maximum(along_key, 1.0)), 0))


@gluon.jit(do_not_specialize=["T", "N", "H", "HV", "scale"])
def hopper_head_factor_kernel(
    # The parameters of `delta_factor_kernel` in `kernels`, with the same meanings.
    vectors,  # `KeyVectors`
    gates,  # `GateSums`, without `rest`
    W,  # [tokens, HV, K]
    P,  # [chunks, HV, C, C], transposed
    Y,  # [chunks, HV, C, C], transposed, in float32; in bfloat16 without W and P
    log_norm,  # [chunks, HV]
    cu_seqlens,
    T,
    N,
    scale,
    H,
    HV,
    K: gl.constexpr,
    C: gl.constexpr,
    READ_BEFORE: gl.constexpr,
):
    """Fills `W`, `P` and, if given, `Y` and `log_norm`; or `Y` alone, for `hopper/head_state_passing`.

    Then `Y` has two parts: the larger ones on and above the diagonal, and the smaller ones, transposed, below it.
    """
    q, k, a, beta = vectors
    sums = gates.sums
    of_group, row, hk, lo, hi = tile_of_program(HV // H, T, N, H, cu_seqlens, C)
    h = hk * (HV // H) + of_group
    if lo >= hi:
        return
    size = gl.minimum(hi - lo, C).to(gl.int32)
    rh = row * HV + h
    first = lo * HV + h
    of_keys = (lo * H + hk) * K
    OF_K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], OF_K)
    copy(k_s, k + of_keys, H * K, size)
    a_s = k_s
    if a is not None:
        a_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], OF_K)
        copy(a_s, a + of_keys, H * K, size)
    commit_group()
    if W is not None:
        q_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], OF_K)
        copy(q_s, q + of_keys, H * K, size)
        commit_group()
    L: gl.constexpr = products(C)
    s = gl.arange(0, C, gl.SliceLayout(1, L))
    t = gl.arange(0, C, gl.SliceLayout(0, L))
    beta_s = gl.load(beta + first + s * HV, mask=s < size, other=0.0).to(gl.float32)
    if sums is not None:
        sums += rh * C
        sum_s = gl.load(sums + s)
        total = gl.load(sums + C - 1)
    zeros = gl.zeros([C, C], gl.float32, L)

    # 1. The products of pairs of tokens. Rows are writing tokens, columns reading tokens.
    wait_for_copies(0 if W is None else 1)
    ak = warpgroup_mma(k_s, a_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    qk = ak
    if W is not None:
        wait_for_copies(0)
        qk = warpgroup_mma(k_s, q_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    ak, qk = warpgroup_mma_wait(0, [ak, qk])
    if log_norm is not None:
        _store_log_norm(log_norm + rh, ak, beta_s, total)
    if sums is not None:
        between = gl.exp2(-gl.abs(sum_s[:, None] - gl.load(sums + t)[None, :]))
        if READ_BEFORE:
            ak *= gl.exp2(-gl.abs(sum_s[:, None] - sums_before(sums, t)[None, :]))
        else:
            ak *= between
    parts_s = gl.allocate_shared_memory(
        gl.bfloat16, [1 if W is None else 2, C, C], gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    )
    if W is not None:
        weights = (beta_s * scale.to(gl.float32))[:, None]
        if sums is not None:
            weights = weights * between
        store_parts(parts_s, gl.where(s[:, None] <= t[None, :], qk * weights, 0.0))
        make_visible()

    # 2. Y and P.
    solved = inverse(gl.where(s[:, None] < t[None, :], ak * beta_s[:, None], 0.0))
    at = rh * C * C
    if W is None:
        high, low = parts(solved)
        low_s = parts_s.index(0)
        low_s.store(low)
        low = low_s.permute((1, 0)).load(L)
        store(Y + at, gl.where(s[:, None] <= t[None, :], high, low), C, C)
    else:
        if Y is not None:
            gl.store(Y + at + s[:, None] * C + t[None, :], solved)
        # Loaded late, so that they do not occupy registers before.
        weights_t = gl.load(beta + first + t * HV, mask=t < size, other=0.0).to(gl.float32)
        if sums is not None:
            weights_t *= gl.exp2(total - gl.load(sums + t))
        store(P + at, multiply(solved, rows(parts_s, 0, C), zeros), C, C)

        # 3. W.
        written = multiply(solved * weights_t[None, :], (k_s,), gl.zeros([C, K], gl.float32, products(K)))
        store(W + first * K, written, HV * K, size)
