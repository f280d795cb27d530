// Optimizers, as PyTorch defines them. Weights and state are float; the gradient has the element type.
// `scalars` is a device vector: a new learning rate needs no new launch arguments. Its indices come from the host.

extern "C" __global__ void sgd_update(float* weight, const T* gradient, const float* scalars, int rate, int scale,
                                      Index size, float weight_decay, int finite) {
    if (scalars[finite] == 0) return;
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        float w[N], g[N];
        load<N>(w, weight + first);
        load<N>(g, gradient + first);
#pragma unroll
        for (int i = 0; i < N; i++) w[i] -= scalars[rate] * (g[i] * scalars[scale] + weight_decay * w[i]);
        store<N>(weight + first, w);
    });
}

extern "C" __global__ void sgd_momentum_update(float* weight, float* velocity, const T* gradient, const float* scalars,
                                               int rate, int scale, Index size, float momentum, int nesterov,
                                               float weight_decay, int finite) {
    if (scalars[finite] == 0) return;
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        float w[N], v[N], g[N];
        load<N>(w, weight + first);
        load<N>(v, velocity + first);
        load<N>(g, gradient + first);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float decayed = g[i] * scalars[scale] + weight_decay * w[i];
            v[i] = momentum * v[i] + decayed;
            w[i] -= scalars[rate] * (nesterov ? decayed + momentum * v[i] : v[i]);
        }
        store<N>(weight + first, w);
        store<N>(velocity + first, v);
    });
}

extern "C" __global__ void adam_update(float* weight, float* moment1, float* moment2, const T* gradient,
                                       const float* scalars, int rate, int scale, int bias1, int bias2, Index size,
                                       float beta1, float beta2, float rest1, float rest2, float eps, float weight_decay,
                                       int finite) {
    if (scalars[finite] == 0) return;
    float step = (float)((double)scalars[rate] / (double)scalars[bias1]);
    float root = (float)sqrt((double)scalars[bias2]);
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        float w[N], m[N], v[N], g[N];
        load<N>(w, weight + first);
        load<N>(m, moment1 + first);
        load<N>(v, moment2 + first);
        load<N>(g, gradient + first);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float decayed = g[i] * scalars[scale] + weight_decay * w[i];
            m[i] = beta1 * m[i] + rest1 * decayed;
            v[i] = beta2 * v[i] + rest2 * (decayed * decayed);
            w[i] -= step * (m[i] / (sqrtf(v[i]) / root + eps));
        }
        store<N>(weight + first, w);
        store<N>(moment1 + first, m);
        store<N>(moment2 + first, v);
    });
}

// Slices of one type, several at once: a block finds its slice by the last block of each.
constexpr int SLICES = 48;

struct Slices {
    float* weight[SLICES];
    float* first[SLICES];
    float* second[SLICES];
    const T* gradient[SLICES];
    T* narrow[SLICES];  // the weights rounded, or null
    Index size[SLICES];
    int end[SLICES];
};

template <typename F> __device__ inline void each_slice(const Slices& all, F f) {
    int slice = 0;
    while ((int)blockIdx.x >= all.end[slice]) slice++;
    Index i = (Index)(blockIdx.x - (slice ? all.end[slice - 1] : 0)) * THREADS + threadIdx.x;
    Index size = all.size[slice], packs = size / V;
    if (i < packs) f(slice, i * V, Width<V>());
    else if (V > 1 && i - packs < size - packs * V) f(slice, packs * V + (i - packs), Width<1>());
}

template <int N> __device__ inline void store_weight(const Slices& all, int slice, Index first, const float* w) {
    store<N>(all.weight[slice] + first, w);
    if (all.narrow[slice]) store<N>(all.narrow[slice] + first, w);
}

extern "C" __global__ void sgd_update_all(Slices all, const float* scalars, int rate, int scale, int finite,
                                          float weight_decay) {
    if (scalars[finite] == 0) return;
    each_slice(all, [&](int slice, Index at, auto width) {
        constexpr int N = decltype(width)::value;
        float w[N], g[N];
        load<N>(w, all.weight[slice] + at);
        load<N>(g, all.gradient[slice] + at);
#pragma unroll
        for (int i = 0; i < N; i++) w[i] -= scalars[rate] * (g[i] * scalars[scale] + weight_decay * w[i]);
        store_weight<N>(all, slice, at, w);
    });
}

extern "C" __global__ void sgd_momentum_update_all(Slices all, const float* scalars, int rate, int scale, int finite,
                                                   float momentum, int nesterov, float weight_decay) {
    if (scalars[finite] == 0) return;
    each_slice(all, [&](int slice, Index at, auto width) {
        constexpr int N = decltype(width)::value;
        float w[N], v[N], g[N];
        load<N>(w, all.weight[slice] + at);
        load<N>(v, all.first[slice] + at);
        load<N>(g, all.gradient[slice] + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float decayed = g[i] * scalars[scale] + weight_decay * w[i];
            v[i] = momentum * v[i] + decayed;
            w[i] -= scalars[rate] * (nesterov ? decayed + momentum * v[i] : v[i]);
        }
        store<N>(all.first[slice] + at, v);
        store_weight<N>(all, slice, at, w);
    });
}

extern "C" __global__ void adam_update_all(Slices all, const float* scalars, int rate, int scale, int finite, int bias1,
                                           int bias2, float beta1, float beta2, float rest1, float rest2, float eps,
                                           float weight_decay) {
    if (scalars[finite] == 0) return;
    float step = (float)((double)scalars[rate] / (double)scalars[bias1]);
    float root = (float)sqrt((double)scalars[bias2]);
    each_slice(all, [&](int slice, Index at, auto width) {
        constexpr int N = decltype(width)::value;
        float w[N], m[N], v[N], g[N];
        load<N>(w, all.weight[slice] + at);
        load<N>(m, all.first[slice] + at);
        load<N>(v, all.second[slice] + at);
        load<N>(g, all.gradient[slice] + at);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float decayed = g[i] * scalars[scale] + weight_decay * w[i];
            m[i] = beta1 * m[i] + rest1 * decayed;
            v[i] = beta2 * v[i] + rest2 * (decayed * decayed);
            w[i] -= step * (m[i] / (sqrtf(v[i]) / root + eps));
        }
        store<N>(all.first[slice] + at, m);
        store<N>(all.second[slice] + at, v);
        store_weight<N>(all, slice, at, w);
    });
}

extern "C" __global__ void scale_loss(float* scalars, const float* scaling, int weight, int gradient, int scale) {
    scalars[weight] *= scaling[scale];
    scalars[gradient] /= scaling[scale];
}

// Clears the flag where an element is infinite or NaN. All who write it write the same, so the order does not matter.
extern "C" __global__ void check_finite(float* scaling, const T* gradient, Index size, int finite) {
    bool good = true;
    Index step = (Index)gridDim.x * THREADS, packs = size / V, first = (Index)blockIdx.x * THREADS + threadIdx.x;
    for (Index pack = first; pack < packs; pack += step) {
        float value[V];
        load<V>(value, gradient + pack * V);
#pragma unroll
        for (int i = 0; i < V; i++) good = good && isfinite(value[i]);
    }
    for (Index i = packs * V + first; i < size; i += step) good = good && isfinite(to_float(gradient[i]));
    if (!good) scaling[finite] = 0;
}

// The sum of what the threads of a block have, in thread 0; always added in the same order.
__device__ inline double block_sum(double value) {
    __shared__ double shared[THREADS];
    shared[threadIdx.x] = value;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    return shared[threadIdx.x];
}

// The sum of the squares of the elements that each block visits.
extern "C" __global__ void square_sums(double* sums, const T* gradient, Index size) {
    double sum = 0;
    Index step = (Index)gridDim.x * THREADS, packs = size / V, first = (Index)blockIdx.x * THREADS + threadIdx.x;
    for (Index pack = first; pack < packs; pack += step) {
        float value[V];
        load<V>(value, gradient + pack * V);
#pragma unroll
        for (int i = 0; i < V; i++) sum += (double)value[i] * value[i];
    }
    for (Index i = packs * V + first; i < size; i += step) {
        double value = to_float(gradient[i]);
        sum += value * value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Clips by the norm, whose square is the sum of `sums`. One block.
extern "C" __global__ void clip_scale(float* scalars, const double* sums, int count, int scale, double max_norm) {
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) sum += sums[i];
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    double factor = max_norm / (sqrt(sum) * scalars[scale] + 1e-6);
    if (!(factor >= 1)) scalars[scale] = (float)(scalars[scale] * factor);  // NaN is not
}

extern "C" __global__ void adapt_scale(float* scaling, float* scalars, int scale, int good, int finite, int skipped,
                                       int finite_scalar, int interval) {
    bool all = scaling[finite] != 0;
    float now = scaling[scale], count = scaling[good] + 1;
    if (!all) {
        now = fmaxf(now / 2, 1.0f);
        count = 0;
        scaling[skipped] += 1;
    } else if (count == interval) {
        now = fminf(now * 2, 16777216.0f);
        count = 0;
    }
    scaling[scale] = now;
    scaling[good] = count;
    scaling[finite] = 1;
    scalars[finite_scalar] = all ? 1 : 0;
}
