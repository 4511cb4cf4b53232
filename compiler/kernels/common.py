"""What kernels written thread by thread share."""

import tilelang.language as T

# These kernels bound every access and place every barrier themselves. Of shared buffers that, in program order, are not
# used at the same time tilelang would make one: threads that are ahead then overwrite what others still read.
BY_HAND = {"tl.disable_safe_memory_legalize": True, "tl.disable_shared_memory_reuse": True}
CHUNKS = 1 << 28  # more than a tensor has: extents of pointers are never looked at


def load_words(words: int, vector: int):
    """A macro: values[base : base + words · vector] = the words from `word` on of x, which is in words of `vector`."""

    @T.macro
    def load(x, values, base, word):
        for w in T.unroll(words):
            for v in T.vectorized(vector):
                values[base + w * vector + v] = x[word + w, v]

    return load
