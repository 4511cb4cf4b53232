"""gemm on Hopper: a persistent, warp-specialized kernel.

One producer warp fills a ring of shared-memory stages through TMA; two consumer warpgroups each multiply 64 rows by the
whole tile width with wgmma, keep one group of wgmmas in flight while the previous stage is handed back, and store their
half of the tile through a swizzled buffer. The grid is one block an SM; tiles are walked in groups of `raster` row
tiles, so that the blocks that run together share operands in L2.
"""

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from kgen.compiler.ops.contract import Config
from kgen.compiler.ops.gemm import Gemm
from kgen.compiler.program import Launch, Program

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # 65,536 a block: 128 × 24 + 256 × 240
OWN_BARRIERS = {"tl.disable_warp_specialized": True, "tl.disable_thread_storage_sync": True}
STORE_COLUMNS = 64  # a 128-byte swizzle span of 16-bit elements


def program(op: Gemm, config: Config) -> Program:
    """The program of `op` with `config`."""
    config = dict(config)
    form = {"persistent": persistent}[config.pop("form")]
    layout = "nt" if op.b.major == "k" else "nn"
    name = f"gemm_{op.a.dtype}_{layout}_{config['tile_m']}x{config['tile_n']}x{config['tile_k']}"
    return Program((Launch(form(op, **config), name, pass_config=OWN_BARRIERS),))


def persistent(op: Gemm, tile_m: int, tile_n: int, tile_k: int, stages: int, raster: int):
    """The kernel described above; tile_m is 128, n and k tails are clipped by TMA."""
    assert tile_m == 128, "two consumer warpgroups of 64 rows each"
    n, k = op.static("n"), op.static("k")
    m = T.dynamic("m") if op.extent("m") == "m" else op.static("m")
    dtype, k_major = op.a.dtype, op.b.major == "k"
    b_shape, b_tile = ((n, k), (tile_n, tile_k)) if k_major else ((k, n), (tile_k, tile_n))
    half = tile_m // 2
    columns = -(-n // tile_n)
    k_tiles = -(-k // tile_k)
    group = raster * columns

    def row_of(index, rows):
        """Row number of tile `index`: groups of `raster` row tiles, each walked column by column."""
        first = index // group * raster
        return first + T.truncmod(index % group, T.min(raster, rows - first))

    def column_of(index, rows):
        """Column number of tile `index`."""
        return T.truncdiv(index % group, T.min(raster, rows - index // group * raster))

    @T.macro
    def consume(a_tiles, b_tiles, staging, full, empty, out, side, rows, workers, pid, tx):
        acc = T.alloc_fragment((half, tile_n), "float32")
        stage = T.alloc_var("int32", init=0)
        phase = T.alloc_var("int32", init=0)
        previous = T.alloc_var("int32", init=0)
        leader = 128 * (side + 1)
        index = T.alloc_var("int32", init=0)
        mi = T.alloc_var("int32", init=0)
        ni = T.alloc_var("int32", init=0)
        index = pid
        while index < rows * columns:
            mi = row_of(index, rows)
            ni = column_of(index, rows)
            for ki in T.serial(k_tiles):
                T.barrier_wait(full[stage], phase)
                T.wgmma_gemm(
                    a_tiles[stage, :, :],
                    b_tiles[stage, :, :],
                    acc,
                    transpose_B=k_major,
                    policy=T.GemmWarpPolicy.FullRow,
                    clear_accum=(ki == 0),
                )
                if ki > 0:
                    T.wait_wgmma(1)
                    if tx % 32 == 0:
                        T.barrier_arrive(empty[previous])
                previous = stage
                stage = stage + 1
                if stage == stages:
                    stage = 0
                    phase = phase ^ 1
            T.wait_wgmma(0)
            if tx % 32 == 0:
                T.barrier_arrive(empty[previous])
            T.warpgroup_fence_operand(acc, num_regs=half * tile_n // 128)
            for c in range(tile_n // STORE_COLUMNS):
                if tx == leader:
                    T.tma_store_wait(0)
                T.sync_threads(barrier_id=4 + side, arrive_count=128)
                T.copy(acc[:, c * STORE_COLUMNS : (c + 1) * STORE_COLUMNS], staging)
                T.fence_proxy_async()
                T.sync_threads(barrier_id=4 + side, arrive_count=128)
                T.tma_copy(
                    staging, out[mi * tile_m + side * half, ni * tile_n + c * STORE_COLUMNS], leader_scope_threads=128
                )
            index = index + workers
        if tx == leader:
            T.tma_store_wait(0)

    @T.prim_func
    def kernel(
        a: T.Tensor((m, k), dtype), b: T.Tensor(b_shape, dtype), out: T.Tensor((m, n), dtype), sm_count: T.int32
    ):
        with T.Kernel(T.min(T.ceildiv(m, tile_m) * columns, sm_count), threads=384) as pid:
            a0 = T.alloc_shared((stages, half, tile_k), dtype)
            a1 = T.alloc_shared((stages, half, tile_k), dtype)
            b_tiles = T.alloc_shared((stages, *b_tile), dtype)
            staging0 = T.alloc_shared((half, STORE_COLUMNS), dtype)
            staging1 = T.alloc_shared((half, STORE_COLUMNS), dtype)
            T.annotate_layout({t: make_swizzled_layout(t) for t in (a0, a1, staging0, staging1)})
            T.annotate_layout({b_tiles: make_swizzled_layout(b_tiles, k_major=k_major)})
            full = T.alloc_barrier([1] * stages)
            empty = T.alloc_barrier([8] * stages)
            tx = T.get_thread_binding()
            rows = T.ceildiv(m, tile_m)
            workers = T.min(rows * columns, sm_count)
            if tx < 128:
                T.dec_max_nreg(PRODUCER_REGISTERS)
                if tx < 32:
                    stage = T.alloc_var("int32", init=0)
                    phase = T.alloc_var("int32", init=1)
                    index = T.alloc_var("int32", init=0)
                    mi = T.alloc_var("int32", init=0)
                    ni = T.alloc_var("int32", init=0)
                    index = pid
                    while index < rows * columns:
                        mi = row_of(index, rows)
                        ni = column_of(index, rows)
                        for ki in T.serial(k_tiles):
                            T.barrier_wait(empty[stage], phase)
                            T.tma_copy(
                                a[mi * tile_m : mi * tile_m + half, ki * tile_k : (ki + 1) * tile_k],
                                a0[stage, :, :],
                                barrier=full[stage],
                                leader_scope_threads=32,
                            )
                            T.tma_copy(
                                a[mi * tile_m + half : (mi + 1) * tile_m, ki * tile_k : (ki + 1) * tile_k],
                                a1[stage, :, :],
                                barrier=full[stage],
                                leader_scope_threads=32,
                            )
                            if k_major:
                                T.tma_copy(
                                    b[ni * tile_n : (ni + 1) * tile_n, ki * tile_k : (ki + 1) * tile_k],
                                    b_tiles[stage, :, :],
                                    barrier=full[stage],
                                    leader_scope_threads=32,
                                )
                            else:
                                T.tma_copy(
                                    b[ki * tile_k : (ki + 1) * tile_k, ni * tile_n : (ni + 1) * tile_n],
                                    b_tiles[stage, :, :],
                                    barrier=full[stage],
                                    leader_scope_threads=32,
                                )
                            if tx == 0:
                                T.barrier_arrive(full[stage])
                            stage = stage + 1
                            if stage == stages:
                                stage = 0
                                phase = phase ^ 1
                        index = index + workers
            elif tx < 256:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                consume(a0, b_tiles, staging0, full, empty, out, 0, rows, workers, pid, tx)
            else:
                T.inc_max_nreg(CONSUMER_REGISTERS)
                consume(a1, b_tiles, staging1, full, empty, out, 1, rows, workers, pid, tx)

    return kernel
