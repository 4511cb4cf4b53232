"""One scale for the whole tensor, in one cooperative launch.

Every block reads its share, keeps as much of it as registers (`held` chunks a thread) and shared memory (`shelved`)
take, meets the others, and writes. What it could not keep it reads again, backwards, while the freshest of it is in L2.
The most that a config keeps is 288 KiB a block: 39 MB of x on 132 multiprocessors are read once.

The meeting is in `meet`, zero on entry and left zero: [0] the largest magnitude's bits, [1] blocks that arrived,
[2] blocks that left. The blocks wait for each other, so all of them must be resident, which a cooperative launch
guarantees or refuses.
"""

import tilelang.language as T

from kgen.compiler.kernels.common import CHUNKS, load_words
from kgen.compiler.kernels.quantize.arithmetic import SIZE, codec
from kgen.compiler.kernels.quantize.common import reduce_block
from kgen.compiler.ops.numerics import itemsize
from kgen.compiler.ops.quantize import Quantize

IN_FLIGHT = 2  # chunks of a thread that is streaming
MEET_BYTES = 12


def tensor(op: Quantize, threads: int, each: int, held: int, shelved: int):
    """The kernel: `each` elements a chunk. What does not fill a chunk at the end is block 0's, an element a thread."""
    k, x_dtype = op.static("k"), op.x.dtype
    codes_of = codec(op)
    reduce = reduce_block(codes_of, threads)
    vector = 16 // itemsize(x_dtype)
    words = each // vector
    load_whole = load_words(words, vector)

    @T.macro
    def load(x, values, base, chunk, chunks):
        """values[base : base + each] = chunk number `chunk`, or zeros where there is none."""
        if chunk < chunks:
            load_whole(x, values, base, chunk * words)
        else:
            for e in T.unroll(each):
                values[base + e] = T.cast(0, x_dtype)

    @T.macro
    def store(q, values, base, codes, s, chunk, chunks):
        if chunk < chunks:
            codes_of.encode(values, base, codes, s, each)
            for e in T.vectorized(each):
                q[chunk, e] = codes[e]

    @T.prim_func
    def kernel(
        x: T.Tensor((CHUNKS, vector), x_dtype),
        q: T.Tensor((CHUNKS, each), codes_of.dtype),
        scale: T.Tensor((1,), "float32"),
        meet: T.Tensor((3,), "int32"),
        m: T.int32,
        sm_count: T.int32,
    ):
        with T.Kernel(T.min(sm_count, T.ceildiv(m * k, each * threads)), threads=threads) as block:
            tx = T.get_thread_binding()
            values = T.alloc_local((held * each,), x_dtype)
            passing = T.alloc_local((IN_FLIGHT * each,), x_dtype)
            codes = T.alloc_local((each,), codes_of.dtype)
            tail = T.alloc_local((1,), x_dtype)
            most = T.alloc_local((1,), "int32")
            s = T.alloc_local((SIZE,), "float32")
            parts = T.alloc_shared((threads // 32,), "int32")
            together = T.alloc_shared((1,), "int32")
            shelf = T.alloc_shared((max(1, shelved * words) * threads, vector), x_dtype)
            blocks = T.min(sm_count, T.ceildiv(m * k, each * threads))
            chunks = m * k // each
            step = blocks * threads
            first = block * threads + tx
            turns = T.ceildiv(chunks, step)  # chunks a thread
            rest = T.max(0, T.ceildiv(turns - held - shelved, IN_FLIGHT))
            last = chunks * each + first  # this thread's element of the tail
            codes_of.clear(most)
            for j in T.unroll(held):
                load(x, values, j * each, first + j * step, chunks)
            if k % each:
                if last < m * k:
                    tail[0] = x[last // vector, last % vector]
                    codes_of.grow(most, tail, 0, 1)
            codes_of.grow(most, values, 0, held * each)
            for j in T.unroll(shelved):
                if held + j < turns:
                    load(x, passing, j % IN_FLIGHT * each, first + (held + j) * step, chunks)
                    codes_of.grow(most, passing, j % IN_FLIGHT * each, each)
                    for w in T.unroll(words):
                        for v in T.vectorized(vector):
                            shelf[(j * words + w) * threads + tx, v] = passing[j % IN_FLIGHT * each + w * vector + v]
            for j in T.serial(rest):
                for u in T.unroll(IN_FLIGHT):
                    load(x, passing, u * each, first + (held + shelved + j * IN_FLIGHT + u) * step, chunks)
                codes_of.grow(most, passing, 0, IN_FLIGHT * each)
            reduce(most, parts, tx)
            if tx == 0:
                T.atomic_max(meet[0], most[0], memory_order="relaxed")
                T.atomic_add(meet[1], 1, memory_order="acq_rel")
                while T.atomic_load(meet[1], memory_order="acquire") < blocks:
                    pass
                together[0] = T.atomic_load(meet[0], memory_order="relaxed")
                if T.atomic_add(meet[2], 1, memory_order="acq_rel", return_prev=True) == blocks - 1:
                    meet[0] = 0
                    meet[1] = 0
                    meet[2] = 0
            T.sync_threads()
            most[0] = together[0]
            codes_of.scale(most, s)
            for j in T.serial(rest):
                for u in T.unroll(IN_FLIGHT):
                    load(x, passing, u * each, first + (held + shelved + (rest - 1 - j) * IN_FLIGHT + u) * step, chunks)
                for u in T.unroll(IN_FLIGHT):
                    chunk = first + (held + shelved + (rest - 1 - j) * IN_FLIGHT + u) * step
                    store(q, passing, u * each, codes, s, chunk, chunks)
            for j in T.unroll(shelved):
                if held + j < turns:
                    for w in T.unroll(words):
                        for v in T.vectorized(vector):
                            passing[w * vector + v] = shelf[(j * words + w) * threads + tx, v]
                    store(q, passing, 0, codes, s, first + (held + j) * step, chunks)
            for j in T.unroll(held):
                store(q, values, j * each, codes, s, first + j * step, chunks)
            if k % each:
                if last < m * k:
                    codes_of.encode(tail, 0, codes, s, 1)
                    q[last // each, last % each] = codes[0]
            if (block == 0) & (tx == 0):
                scale[0] = s[0]

    return kernel
