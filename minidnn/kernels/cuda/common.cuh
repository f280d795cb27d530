// What every source begins with. A source is compiled once for each element type (KIND: 0 float, 1 half, 2 bfloat16) and
// each WIDTH: how many elements a thread handles at once, 16 bytes' worth where the extents allow it, else 1. NARROW: they
// are moved one by one, because an address is not aligned; it changes no bit.
// Arithmetic is float; sums across blocks are double, in an order that the shape alone fixes. There are no atomics.

#if KIND == 0
typedef float T;
#elif KIND == 1
#include <cuda_fp16.h>
typedef __half T;
#else
#include <cuda_bf16.h>
typedef __nv_bfloat16 T;
#endif

typedef long long Index;
typedef unsigned char Byte;

constexpr int V = WIDTH;
constexpr int THREADS = 256;
#define LOWEST __int_as_float(0xff800000)  // minus infinity

__device__ inline float to_float(float value) { return value; }
__device__ inline void assign(float& target, float value) { target = value; }
#if KIND == 1
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline void assign(__half& target, float value) { target = __float2half_rn(value); }
#elif KIND == 2
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline void assign(__nv_bfloat16& target, float value) { target = __float2bfloat16_rn(value); }
#endif

template <typename E, int N> struct alignas(sizeof(E) * N) Pack { E item[N]; };

template <int N, typename E> __device__ inline Pack<E, N> fetch(const E* source) {
#ifdef NARROW
    Pack<E, N> pack;
    for (int i = 0; i < N; i++) pack.item[i] = source[i];
    return pack;
#else
    return *reinterpret_cast<const Pack<E, N>*>(source);
#endif
}

template <int N, typename E> __device__ inline void put(E* target, const Pack<E, N>& pack) {
#ifdef NARROW
    for (int i = 0; i < N; i++) target[i] = pack.item[i];
#else
    *reinterpret_cast<Pack<E, N>*>(target) = pack;
#endif
}

template <int N, typename E> __device__ inline void load(float* out, const E* source) {
    Pack<E, N> pack = fetch<N>(source);
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = to_float(pack.item[i]);
}

template <typename E, int N> __device__ inline void widen(float* out, const Pack<E, N>& pack) {
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = to_float(pack.item[i]);
}

template <int N, typename E> __device__ inline void store(E* target, const float* values) {
    Pack<E, N> pack;
#pragma unroll
    for (int i = 0; i < N; i++) assign(pack.item[i], values[i]);
    put<N>(target, pack);
}

// Calls f(first, width) on the elements of a flat tensor: one pack a thread, and the rest one by one.
template <int N> struct Width { static constexpr int value = N; };

template <typename F> __device__ inline void each_pack(Index size, F f) {
    Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
    Index packs = size / V;
    if (i < packs) f(i * V, Width<V>());
    else if (V > 1 && i - packs < size - packs * V) f(packs * V + (i - packs), Width<1>());
}

// A tensor as rows x channels: threadIdx.x walks packs of channels, threadIdx.y and blockIdx.y walk rows.
struct Rows {
    Index first, step;
    int channel;
    bool inside;
    __device__ explicit Rows(int channels) {
        channel = (blockIdx.x * blockDim.x + threadIdx.x) * V;
        inside = channel < channels;
        first = (Index)blockIdx.y * blockDim.y + threadIdx.y;
        step = (Index)gridDim.y * blockDim.y;
    }
};

// Rows that block `block` of `blocks` visits, `lanes` at a time.
__device__ inline Index rows_of_block(Index rows, int block, int blocks, int lanes) {
    Index groups = rows / lanes, rest = rows % lanes;
    Index whole = groups / blocks + (block < groups % blocks ? 1 : 0);
    return whole * lanes + (groups % blocks == block ? rest : 0);
}

// End of the first stage of a sum over rows: joins what the threads of a block have for K values a channel.
// Partials are [block][K][channels].
template <int K> __device__ inline void store_partials(float* partials, const Rows& at, int channels, float sums[K][V]) {
    __shared__ float shared[THREADS * V];
    int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
    for (int k = 0; k < K; k++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < V; i++) shared[thread * V + i] = sums[k][i];
        for (int half = blockDim.y / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.y < half)
#pragma unroll
                for (int i = 0; i < V; i++) shared[thread * V + i] += shared[(thread + half * blockDim.x) * V + i];
        }
        if (threadIdx.y == 0 && at.inside)
#pragma unroll
            for (int i = 0; i < V; i++)
                partials[((Index)blockIdx.y * K + k) * channels + at.channel + i] = shared[thread * V + i];
    }
}

// First stage of a sum over rows: f(row, channel, sums) adds one row.
template <int K, typename F> __device__ inline void partial_sums(float* partials, Index rows, int channels, F f) {
    Rows at(channels);
    float sums[K][V] = {};
    if (at.inside)
#pragma unroll 4
        for (Index row = at.first; row < rows; row += at.step) f(row, at.channel, sums);
    store_partials<K>(partials, at, channels, sums);
}

// Second stage: the sum of value k of a channel over all blocks. Blocks of FINAL_CHANNELS x FINAL_LANES threads; the
// result is whole where threadIdx.y is 0.
constexpr int FINAL_CHANNELS = 32;
constexpr int FINAL_LANES = 32;

template <int K> __device__ inline double final_sum(const float* partials, int blocks, int channels, int channel, int k) {
    __shared__ double shared[FINAL_LANES][FINAL_CHANNELS];
    double sum = 0;
    if (channel < channels)
        for (int block = threadIdx.y; block < blocks; block += FINAL_LANES)
            sum += partials[((Index)block * K + k) * channels + channel];
    __syncthreads();
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
    for (int lane = 0; lane < FINAL_LANES; lane++) sum += shared[lane][threadIdx.x];
    return sum;
}
