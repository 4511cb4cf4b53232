// A right product and wrong ones: out [m, 64] = a [m, 64] · b [64, 64], where b holds its columns as rows. A block of
// (64, 2) threads makes a row: a thread for each column and half of k.
#include <cuda_fp16.h>

constexpr int N = 64, K = 64;

__device__ float half_of_k(const __half *a, const __half *b, int row) {
    float sum = 0;
    for (int k = threadIdx.y * (K / 2); k < (threadIdx.y + 1) * (K / 2); k++)
        sum += __half2float(a[row * K + k]) * __half2float(b[threadIdx.x * K + k]);
    return sum;
}

// The element of this thread's column; in the threads with y = 0.
__device__ float element(const __half *a, const __half *b, int row) {
    __shared__ float upper[N];
    float sum = half_of_k(a, b, row);
    if (threadIdx.y) upper[threadIdx.x] = sum;
    __syncthreads();
    return sum + upper[threadIdx.x];
}

__device__ void store(__half *out, int row, float value) {
    if (!threadIdx.y) out[row * N + threadIdx.x] = __float2half(value);
}

extern "C" __global__ void right(const __half *a, const __half *b, __half *out, int m) {
    store(out, blockIdx.x, element(a, b, blockIdx.x));
}

extern "C" __global__ void off_by_one_row(const __half *a, const __half *b, __half *out, int m) {
    store(out, blockIdx.x, element(a, b, (blockIdx.x + 1) % m));
}

extern "C" __global__ void wrong_scale(const __half *a, const __half *b, __half *out, int m) {
    store(out, blockIdx.x, 1.03f * element(a, b, blockIdx.x));
}

extern "C" __global__ void unwritten_tail(const __half *a, const __half *b, __half *out, int m) {
    if (blockIdx.x < m / 16 * 16) store(out, blockIdx.x, element(a, b, blockIdx.x));
}

// Both halves add to an element that starts as zero, and neither waits for the other.
extern "C" __global__ void race(const __half *a, const __half *b, __half *out, int m) {
    volatile unsigned short *at = (unsigned short *)out + blockIdx.x * N + threadIdx.x;
    float before = __half2float(__ushort_as_half(*at));
    *at = __half_as_ushort(__float2half(before + half_of_k(a, b, blockIdx.x)));
}

// Writes where nothing is.
extern "C" __global__ void fault(const __half *a, const __half *b, __half *out, int m) {
    store(out, blockIdx.x, element(a, b, blockIdx.x));
    *(volatile int *)8 = 1;
}
