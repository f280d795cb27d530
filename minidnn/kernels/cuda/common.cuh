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

// How `blocks` blocks of `lanes` rows at a time share the rows of a tensor: all `base`, the first `more` of them another group
// of lanes, and the one after those the `rest` of the rows.
struct Cut {
    int blocks, lanes, base, more, rest;
    __device__ Index rows(int block) const { return (Index)base + (block < more ? lanes : 0) + (block == more ? rest : 0); }
};

// End of the first stage of a sum over rows: joins what the threads of a block have for K values a channel, first some lanes
// by each thread, then what those threads have. Partials are [block][K][channels].
constexpr int JOINERS = 8;  // threads for one channel, at most

struct Join {
    int width, joiners, channel, joiner;  // channels of the block, threads for each; what this thread does
    bool active;
    __device__ Join() {
        int thread = threadIdx.y * blockDim.x + threadIdx.x;
        width = blockDim.x * V;
        joiners = min(min(THREADS / width, (int)blockDim.y), JOINERS);
        channel = thread % width;
        joiner = thread / width;
        active = joiner < joiners;
    }
    // f(place) of every lane of the thread; its channel of the lane's values is at `place`.
    template <typename F> __device__ void lanes(F f) const {
        if (active)
            for (int lane = joiner; lane < (int)blockDim.y; lane += joiners) f(lane * width + channel, lane);
    }
    // The place of the thread's channel in the tensor if it is the one that writes it, else -1.
    __device__ int writes(int channels) const {
        int place = blockIdx.x * width + channel;
        return joiner == 0 && place < channels ? place : -1;
    }
};

template <int K> __device__ inline void store_partials(float* partials, const Rows& at, int channels, float sums[K][V]) {
    __shared__ Pack<float, V> shared[K][THREADS];
    int thread = threadIdx.y * blockDim.x + threadIdx.x;
    float total[K] = {};
    Join join;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int i = 0; i < V; i++) shared[k][thread].item[i] = sums[k][i];
    __syncthreads();
    float* values[K];
#pragma unroll
    for (int k = 0; k < K; k++) values[k] = shared[k][0].item;
    join.lanes([&](int place, int) {
#pragma unroll
        for (int k = 0; k < K; k++) total[k] += values[k][place];
    });
    if (join.active)  // in place of the first lane that it read, which is no other thread's
#pragma unroll
        for (int k = 0; k < K; k++) values[k][join.joiner * join.width + join.channel] = total[k];
    __syncthreads();
    int place = join.writes(channels);
    if (place < 0) return;
#pragma unroll
    for (int k = 0; k < K; k++) {
        for (int j = 1; j < join.joiners; j++) total[k] += values[k][j * join.width + join.channel];
        partials[((Index)blockIdx.y * K + k) * channels + place] = total[k];
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

// Second stage. Blocks of FINAL_CHANNELS x FINAL_LANES threads: each lane adds the partial sums of some blocks, all loads of a
// thread in flight together, then the lanes are joined in two steps.
constexpr int FINAL_CHANNELS = 32;
constexpr int FINAL_LANES = 32;
constexpr int FINAL_THREADS = FINAL_CHANNELS * FINAL_LANES;  // in __launch_bounds__: a thread may have 64 registers
constexpr int JOINING_LANES = 4;

// K sums over the lanes of a block; whole where threadIdx.y is 0.
template <int K> __device__ inline void over_lanes(double (&sums)[K]) {
    __shared__ double shared[K][FINAL_LANES][FINAL_CHANNELS];
#pragma unroll
    for (int k = 0; k < K; k++) shared[k][threadIdx.y][threadIdx.x] = sums[k];
    __syncthreads();
    if (threadIdx.y < JOINING_LANES)
#pragma unroll
        for (int k = 0; k < K; k++) {
#pragma unroll
            for (int lane = JOINING_LANES; lane < FINAL_LANES; lane += JOINING_LANES)
                sums[k] += shared[k][threadIdx.y + lane][threadIdx.x];
            shared[k][threadIdx.y][threadIdx.x] = sums[k];
        }
    __syncthreads();
    if (threadIdx.y == 0)
#pragma unroll
        for (int k = 0; k < K; k++)
#pragma unroll
            for (int lane = 1; lane < JOINING_LANES; lane++) sums[k] += shared[k][lane][threadIdx.x];
}

// The sums of all K values of a channel over all blocks; whole where threadIdx.y is 0.
template <int K>
__device__ inline void final_sums(const float* partials, int blocks, int channels, int channel, double (&sums)[K]) {
#pragma unroll
    for (int k = 0; k < K; k++) sums[k] = 0;
    if (channel < channels)
#pragma unroll 4
        for (int block = threadIdx.y; block < blocks; block += FINAL_LANES)
#pragma unroll
            for (int k = 0; k < K; k++) sums[k] += partials[((Index)block * K + k) * channels + channel];
    over_lanes<K>(sums);
}
