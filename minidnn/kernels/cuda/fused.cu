// Batch normalisation with the ReLU behind it, and with the addition between them; bias and ReLU behind a convolution.
// Statistics, weight and bias of a batch norm are float. Behind a ReLU dz = dy where y > 0, else 0.

// The sign of y as it was stored: a value that T rounds to zero is none.
__device__ inline bool positive(float value) {
    T stored;
    assign(stored, value);
    return to_float(stored) > 0.0f;
}

__device__ inline float rectified(float value) { return value <= 0.0f ? 0.0f : value; }  // NaN stays NaN

// y = (x - centre) * scale + shift: forward and backward must not round it differently.
struct Affine {
    float centre[V], scale[V], shift[V];
    __device__ Affine(int channel, const float* mean, const float* rstd, const float* weight, const float* bias) {
        float factor[V];
        load<V>(centre, mean + channel);
        load<V>(scale, rstd + channel);
        load<V>(factor, weight + channel);
        load<V>(shift, bias + channel);
#pragma unroll
        for (int i = 0; i < V; i++) scale[i] = __fmul_rn(scale[i], factor[i]);
    }
    __device__ float operator()(float x, int i) const { return __fmaf_rn(__fsub_rn(x, centre[i]), scale[i], shift[i]); }
};

// f(count, place, stride) on the thread's rows, several at a time while there are as many, then one by one: the element of
// row j is at place + j * stride.
template <int N, typename F> __device__ inline void each_bunch(const Rows& at, Index rows, int channels, F f) {
    if (!at.inside) return;
    Index row = at.first, stride = at.step * channels;
    for (; row + (N - 1) * at.step < rows; row += N * at.step) f(Width<N>(), row * channels + at.channel, stride);
    for (; row < rows; row += at.step) f(Width<1>(), row * channels + at.channel, stride);
}

template <bool ADD> __device__ inline void apply(T* y, const T* x, const T* residual, const float* mean, const float* rstd,
                                                 const float* weight, const float* bias, Index rows, int channels) {
    Rows at(channels);
    if (!at.inside) return;
    Affine normal(at.channel, mean, rstd, weight, bias);
    for (Index row = at.first; row < rows; row += 2 * at.step) {  // y may be x: all loads before the first store
        Index first = row * channels + at.channel, second = first + at.step * channels;
        bool both = row + at.step < rows;
        float value[2][V], skip[2][V];
        load<V>(value[0], x + first);
        if (ADD) load<V>(skip[0], residual + first);
        if (both) {
            load<V>(value[1], x + second);
            if (ADD) load<V>(skip[1], residual + second);
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < V; i++) value[j][i] = rectified(normal(value[j][i], i) + (ADD ? skip[j][i] : 0.0f));
        store<V>(y + first, value[0]);
        if (both) store<V>(y + second, value[1]);
    }
}

extern "C" __global__ void batch_norm_relu(T* y, const T* x, const float* mean, const float* rstd, const float* weight,
                                           const float* bias, Index rows, int channels) {
    apply<false>(y, x, x, mean, rstd, weight, bias, rows, channels);
}

extern "C" __global__ void batch_norm_add_relu(T* y, const T* x, const T* residual, const float* mean, const float* rstd,
                                               const float* weight, const float* bias, Index rows, int channels) {
    apply<true>(y, x, residual, mean, rstd, weight, bias, rows, channels);
}

extern "C" __global__ void batch_norm_relu_backward_weight_partial(float* partials, const T* dy, const T* x,
                                                                   const float* mean, const float* rstd,
                                                                   const float* weight, const float* bias, Index rows,
                                                                   int channels) {
    Rows at(channels);
    Affine normal(at.inside ? at.channel : 0, mean, rstd, weight, bias);
    float sums[2][V] = {};
    each_bunch<4>(at, rows, channels, [&](auto count, Index place, Index stride) {
        constexpr int N = decltype(count)::value;
        Pack<T, V> gradient[N], value[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            gradient[j] = fetch<V>(dy + place + j * stride);
            value[j] = fetch<V>(x + place + j * stride);
        }
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int i = 0; i < V; i++) {
                float centred = __fsub_rn(to_float(value[j].item[i]), normal.centre[i]);
                float y = __fmaf_rn(centred, normal.scale[i], normal.shift[i]);
                float z = positive(y) ? to_float(gradient[j].item[i]) : 0.0f;
                sums[0][i] += centred * z;
                sums[1][i] += z;
            }
    });
    store_partials<2>(partials, at, channels, sums);
}

extern "C" __global__ void batch_norm_relu_backward_data(T* dx, const T* dy, const T* x, const float* mean,
                                                         const float* rstd, const float* weight, const float* bias,
                                                         const float* d_weight, const float* d_bias, Index rows,
                                                         int channels) {
    Rows at(channels);
    if (!at.inside) return;
    Affine normal(at.channel, mean, rstd, weight, bias);
    float along[V], constant[V], slope[V], share = 1.0f / (float)rows;
    load<V>(slope, rstd + at.channel);
    load<V>(along, d_weight + at.channel);
    load<V>(constant, d_bias + at.channel);
#pragma unroll
    for (int i = 0; i < V; i++) {
        along[i] *= slope[i] * share;
        constant[i] *= share;
    }
    for (Index row = at.first; row < rows; row += 2 * at.step) {
        Index first = row * channels + at.channel, second = first + at.step * channels;
        bool both = row + at.step < rows;
        float gradient[2][V], value[2][V];
        load<V>(gradient[0], dy + first);
        load<V>(value[0], x + first);
        if (both) {
            load<V>(gradient[1], dy + second);
            load<V>(value[1], x + second);
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < V; i++) {
                float z = positive(normal(value[j][i], i)) ? gradient[j][i] : 0.0f;
                gradient[j][i] = (z - ((value[j][i] - normal.centre[i]) * along[i] + constant[i])) * normal.scale[i];
            }
        store<V>(dx + first, gradient[0]);
        if (both) store<V>(dx + second, gradient[1]);
    }
}

// dz = dy (+ dy1) where y > 0, and its sums. dz may be dy or dy1: the loads of a bunch come before its stores.
template <bool NORM, bool SUM> __device__ inline void masked_sums(float* partials, T* dz, const T* dy, const T* dy1,
                                                                  const T* x, const T* y, const float* mean, Index rows,
                                                                  int channels) {
    constexpr int K = NORM ? 2 : 1;
    Rows at(channels);
    float sums[K][V] = {}, centre[V] = {};
    if (NORM && at.inside) load<V>(centre, mean + at.channel);
    each_bunch<NORM ? 2 : 4>(at, rows, channels, [&](auto count, Index place, Index stride) {
        constexpr int N = decltype(count)::value;
        Pack<T, V> gradient[N], other[N], output[N], value[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            gradient[j] = fetch<V>(dy + place + j * stride);
            output[j] = fetch<V>(y + place + j * stride);
            if (SUM) other[j] = fetch<V>(dy1 + place + j * stride);
            if (NORM) value[j] = fetch<V>(x + place + j * stride);
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            float z[V];
#pragma unroll
            for (int i = 0; i < V; i++) {
                z[i] = to_float(gradient[j].item[i]);
                if (SUM) z[i] += to_float(other[j].item[i]);
                z[i] = to_float(output[j].item[i]) > 0.0f ? z[i] : 0.0f;
                if (NORM) sums[0][i] += (to_float(value[j].item[i]) - centre[i]) * z[i];
                sums[K - 1][i] += z[i];
            }
            store<V>(dz + place + j * stride, z);
        }
    });
    store_partials<K>(partials, at, channels, sums);
}

extern "C" __global__ void batch_norm_add_relu_backward_weight_partial(float* partials, T* dz, const T* dy, const T* x,
                                                                       const T* y, const float* mean, Index rows,
                                                                       int channels) {
    masked_sums<true, false>(partials, dz, dy, dy, x, y, mean, rows, channels);
}

extern "C" __global__ void batch_norm_add_relu_backward_weight_sum_partial(float* partials, T* dz, const T* dy,
                                                                           const T* dy1, const T* x, const T* y,
                                                                           const float* mean, Index rows, int channels) {
    masked_sums<true, true>(partials, dz, dy, dy1, x, y, mean, rows, channels);
}

extern "C" __global__ void relu_bias_backward_partial(float* partials, T* dz, const T* dy, const T* y, Index rows,
                                                      int channels) {
    masked_sums<false, false>(partials, dz, dy, dy, dy, y, nullptr, rows, channels);
}
