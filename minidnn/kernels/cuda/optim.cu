// Optimizers, as PyTorch defines them. Weights and state are float; the gradient has the element type.
// `scalars` is a device vector: a new learning rate needs no new launch arguments. Its indices come from the host.

extern "C" __global__ void sgd_update(float* weight, const T* gradient, const float* scalars, int rate, int scale,
                                      Index size, float weight_decay) {
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
                                               float weight_decay) {
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
                                       float beta1, float beta2, float rest1, float rest2, float eps, float weight_decay) {
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
