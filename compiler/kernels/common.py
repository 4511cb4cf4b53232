"""What kernels written thread by thread share."""

import tilelang.language as T

UNGUARDED = {"tl.disable_safe_memory_legalize": True}  # these kernels bound every access themselves
CHUNKS = 1 << 28  # more than a tensor has: extents of pointers are never looked at


def load_words(words: int, vector: int):
    """A macro: values[base : base + words · vector] = the words from `word` on of x, which is in words of `vector`."""

    @T.macro
    def load(x, values, base, word):
        for w in T.unroll(words):
            for v in T.vectorized(vector):
                values[base + w * vector + v] = x[word + w, v]

    return load
