// Kernels that ask the machine of tests/host for everything it has. The wrong ones are wrong on purpose.
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

constexpr unsigned ALL = 0xffffffff;
extern __shared__ int dynamic[];

__device__ unsigned rank_in_cluster() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ int of_rank(const int *own, unsigned rank) {
    unsigned address = __cvta_generic_to_shared(own);
    int value;
    asm volatile("{ .reg .b32 %there;\n"
                 "mapa.shared::cluster.u32 %there, %1, %2;\n"
                 "ld.shared::cluster.s32 %0, [%there]; }" : "=r"(value) : "r"(address), "r"(rank));
    return value;
}

// Right ones: out[0..n) from in[0..n), with n threads in all.

extern "C" __global__ void sorted(const int *in, int *out, int n) {
    using Sort = cub::BlockRadixSort<int, 128, 4, int>;
    using Scan = cub::BlockScan<int, 128>;
    __shared__ union { Sort::TempStorage sort; Scan::TempStorage scan; } storage;
    int keys[4], places[4], ranks[4];
    for (int i = 0; i < 4; i++) keys[i] = in[places[i] = threadIdx.x * 4 + i];
    Sort(storage.sort).SortDescendingBlockedToStriped(keys, places);
    __syncthreads();
    for (int i = 0; i < 4; i++) ranks[i] = keys[i] & 1;
    Scan(storage.scan).ExclusiveSum(ranks, ranks);
    for (int i = 0; i < 4; i++) {
        int at = i * 128 + threadIdx.x;
        out[at] = keys[i], out[n + at] = places[i], out[2 * n + threadIdx.x * 4 + i] = ranks[i];
    }
}

extern "C" __global__ void warps(const int *in, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, value = in[i], all;
    int sum = value;
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(ALL, sum, step);
        if (threadIdx.x % 32 >= step) sum += other;
    }
    out[i] = sum;
    out[n + i] = __match_any_sync(ALL, value % 3);
    out[2 * n + i] = __reduce_max_sync(ALL, value) + __popc(__ballot_sync(ALL, value & 1));
    unsigned half = threadIdx.x % 32 < 16 ? 0xffff : 0xffff0000;  // both halves on their own
    out[3 * n + i] = __shfl_sync(half, value, 3, 16) + __any_sync(half, value == in[0]);
    __match_all_sync(ALL, value, &all);
    out[4 * n + i] = all;
}

extern "C" __global__ void neighbours(const int *in, int *out, int n) {
    __shared__ int own[32];
    own[threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x];
    cluster_sync();
    out[blockIdx.x * 32 + threadIdx.x] = of_rank(own + threadIdx.x, rank_in_cluster() ^ 1);
    cluster_sync();
}

extern "C" __global__ void across_the_grid(const int *in, int *out, int n) {  // scratch: out[n], zero
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i];
    __threadfence();
    __syncthreads();
    if (!threadIdx.x) {
        atomicAdd(out + n, 1);
        while (*(volatile int *)(out + n) < gridDim.x) __nanosleep(20);
    }
    __syncthreads();
    atomicAdd(out + n + 1, ((volatile int *)out)[n - 1 - i]);
}

// Wrong ones.

extern "C" __global__ void no_barrier(const int *in, int *out, int n) {
    dynamic[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = dynamic[(threadIdx.x + 32) % n];
}

extern "C" __global__ void no_cluster_barrier(const int *in, int *out, int n) {
    __shared__ int own[32];
    own[threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x];
    cluster_sync();
    for (int i = 0; rank_in_cluster() && i < 1000; i++) __nanosleep(20);  // the other block exits
    out[blockIdx.x * 32 + threadIdx.x] = of_rank(own + threadIdx.x, rank_in_cluster() ^ 1);
}

extern "C" __global__ void reads_past_the_end(const int *in, int *out, int n) { out[threadIdx.x] = in[threadIdx.x + 1]; }
extern "C" __global__ void writes_before_the_start(const int *in, int *out, int n) { out[int(threadIdx.x) - 1] = 1; }
extern "C" __global__ void past_shared(const int *in, int *out, int n) { dynamic[threadIdx.x + 1] = in[threadIdx.x]; }
extern "C" __global__ void misaligned(const int *in, int *out, int n) { *(int4 *)(out + 4) = *(const int4 *)(in + 1); }
extern "C" __global__ void trap(const int *in, int *out, int n) { if (threadIdx.x == 5) __trap(); }

extern "C" __global__ void not_all_arrive(const int *in, int *out, int n) {
    if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");
    else asm volatile("bar.sync 2, 64;");
}

extern "C" __global__ void lane_missing(const int *in, int *out, int n) {
    if (threadIdx.x != 3) out[threadIdx.x] = __shfl_sync(ALL, in[threadIdx.x], 0);
    else __syncthreads();
}
