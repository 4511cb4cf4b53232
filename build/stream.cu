// A plain streaming kernel: reads n_in and writes n_out 16-byte words, the stores depending on the loads as a real
// kernel's do. What it takes is the practical floor of any kernel that moves as many bytes.
//
// The words are cut into gridDim.x equal parts, one a block; UNROLL loads a thread are in flight.

template <int UNROLL>
static __device__ void stream(const uint4* __restrict__ in, uint4* __restrict__ out, long long n_in, long long n_out) {
    long long part = blockIdx.x, parts = gridDim.x;
    long long begin = n_in * part / parts, end = n_in * (part + 1) / parts;
    uint4 sum = make_uint4(part, 0, 0, 0);
    for (long long i = begin + threadIdx.x; i < end; i += (long long)blockDim.x * UNROLL) {
        uint4 words[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            long long at = i + (long long)u * blockDim.x;
            words[u] = at < end ? in[at] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            sum.x ^= words[u].x;
            sum.y ^= words[u].y;
            sum.z ^= words[u].z;
            sum.w ^= words[u].w;
        }
    }
    long long from = n_out * part / parts, to = n_out * (part + 1) / parts;
    for (long long i = from + threadIdx.x; i < to; i += blockDim.x) out[i] = sum;
    if (n_out == 0 && sum.x == 0x9e3779b9u && sum.y == 0x7f4a7c15u) out[0] = sum;  // keeps the loads alive
}

#define STREAM(UNROLL)                                                                                            \
    extern "C" __global__ void stream_##UNROLL(const uint4* in, uint4* out, long long n_in, long long n_out) {    \
        stream<UNROLL>(in, out, n_in, n_out);                                                                     \
    }

STREAM(1)
STREAM(2)
STREAM(4)
STREAM(8)
