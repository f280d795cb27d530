// Batch normalisation (Ioffe & Szegedy 2015): per channel over all rows; statistics, weight and bias are float.
// Local response normalisation (Krizhevsky et al. 2012): across neighbouring channels.

// Statistics in one pass over x, and no cancellation: a thread counts deviations from the first value that it sees, so that a
// large mean costs no digits and a thread with an outlier spoils its own share only; then means and sums of squared deviations
// of threads, and of blocks, are joined around one of the means (Chan, Golub & LeVeque 1983), in double.
constexpr int BUNCH = 4;

extern "C" __global__ void batch_norm_statistics_partial(float* partials, const T* x, Index rows, int channels) {
    __shared__ Pack<float, V> shared_mean[THREADS], shared_squares[THREADS];
    __shared__ float shared_count[THREADS];
    __shared__ double shared_total[3][THREADS];
    Rows at(channels);
    float mean[V] = {}, squares[V] = {}, count = 0;
    if (at.inside && at.first < rows) {
        float origin[V], sum[V] = {};
        load<V>(origin, x + at.first * channels + at.channel);
        Index row = at.first, stride = at.step * channels;
        auto add = [&](const Pack<T, V>& pack) {
#pragma unroll
            for (int i = 0; i < V; i++) {
                float deviation = to_float(pack.item[i]) - origin[i];
                sum[i] += deviation;
                squares[i] += deviation * deviation;
            }
        };
        for (; row + (BUNCH - 1) * at.step < rows; row += BUNCH * at.step, count += BUNCH) {
            Pack<T, V> pack[BUNCH];
#pragma unroll
            for (int j = 0; j < BUNCH; j++) pack[j] = fetch<V>(x + row * channels + at.channel + j * stride);
#pragma unroll
            for (int j = 0; j < BUNCH; j++) add(pack[j]);
        }
        for (; row < rows; row += at.step, count += 1) add(fetch<V>(x + row * channels + at.channel));
        float share = 1.0f / count;
#pragma unroll
        for (int i = 0; i < V; i++) {
            float shift = sum[i] * share;
            squares[i] = fmaxf(squares[i] - shift * sum[i], 0.0f);
            mean[i] = origin[i] + shift;
        }
    }
    int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
    for (int i = 0; i < V; i++) shared_mean[thread].item[i] = mean[i], shared_squares[thread].item[i] = squares[i];
    if (threadIdx.x == 0) shared_count[threadIdx.y] = count;
    __syncthreads();
    Join join;
    float *means = shared_mean[0].item, *deviations = shared_squares[0].item, origin = means[join.channel];
    double total[3] = {};  // count, deviation from the origin, square of that
    join.lanes([&](int place, int lane) {
        double rows = shared_count[lane], distance = means[place] - origin;
        total[0] += rows;
        total[1] += rows * distance;
        total[2] += deviations[place] + rows * distance * distance;
    });
    for (int k = 0; k < 3; k++) shared_total[k][thread] = total[k];
    __syncthreads();
    int place = join.writes(channels);
    if (place < 0) return;
    for (int j = 1; j < join.joiners; j++)
        for (int k = 0; k < 3; k++) total[k] += shared_total[k][j * join.width + join.channel];
    double shift = total[1] / total[0], around = total[2] - shift * total[1];
    partials[((Index)blockIdx.y * 2) * channels + place] = (float)(origin + shift);
    partials[((Index)blockIdx.y * 2 + 1) * channels + place] = (float)(around < 0 ? 0.0 : around);
}

// Mean and variance of all rows from those of the blocks: f(channel, mean, variance).
template <typename F> __device__ inline void moments(const float* partials, Index rows, int channels, Cut cut, F f) {
    int channel = blockIdx.x * FINAL_CHANNELS + threadIdx.x;
    double sums[2] = {}, origin = channel < channels ? partials[channel] : 0.0f;
    if (channel < channels)
#pragma unroll 4
        for (int block = threadIdx.y; block < cut.blocks; block += FINAL_LANES) {
            const float* partial = partials + (Index)block * 2 * channels + channel;
            double count = (double)cut.rows(block), distance = partial[0] - origin;
            sums[0] += count * distance;
            sums[1] += partial[channels] + count * distance * distance;
        }
    over_lanes<2>(sums);
    double shift = sums[0] / (double)rows, variance = sums[1] / (double)rows - shift * shift;
    if (threadIdx.y == 0 && channel < channels) f(channel, origin + shift, variance < 0 ? 0.0 : variance);
}

extern "C" __global__ void __launch_bounds__(FINAL_THREADS) batch_norm_statistics_final(
    float* mean, float* rstd, const float* partials, Index rows, int channels, Cut cut, double eps) {
    moments(partials, rows, channels, cut, [&](int channel, double centre, double variance) {
        mean[channel] = (float)centre;
        rstd[channel] = (float)(1.0 / sqrt(variance + eps));
    });
}

// The same, and the running averages: momentum is not negative, so no block needs to know the counter.
extern "C" __global__ void __launch_bounds__(FINAL_THREADS) batch_norm_statistics_running_final(
    float* mean, float* rstd, float* running_mean, float* running_var, long long* batches, const float* old_mean,
    const float* old_var, const long long* old_batches, const float* partials, Index rows, int channels, Cut cut, double eps,
    double momentum, double unbias) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) *batches = *old_batches + 1;
    int own = blockIdx.x * FINAL_CHANNELS + threadIdx.x;
    bool writes = threadIdx.y == 0 && own < channels;
    float mean_before = writes ? old_mean[own] : 0.0f, var_before = writes ? old_var[own] : 0.0f;  // early: a load takes long
    moments(partials, rows, channels, cut, [&](int channel, double centre, double variance) {
        float inverse = (float)(1.0 / sqrt(variance + eps));
        double biased = 1.0 / ((double)inverse * inverse) - eps;  // as the row of its own does, from what it is given
        biased = biased < 0 ? 0 : biased;
        mean[channel] = (float)centre;
        rstd[channel] = inverse;
        running_mean[channel] = (float)((1 - momentum) * mean_before + momentum * (float)centre);
        running_var[channel] = (float)((1 - momentum) * var_before + momentum * biased * unbias);
    });
}

// y = (x - centre) * scale + shift, two rows at a time: y may be x, so the compiler cannot advance a load past a store.
__device__ inline void affine(T* y, const T* x, const Rows& at, Index rows, int channels, const float* centre,
                              const float* scale, const float* shift) {
    for (Index row = at.first; row < rows; row += 2 * at.step) {
        Index first = row * channels + at.channel, second = first + at.step * channels;
        bool both = row + at.step < rows;
        float value[2][V];
        load<V>(value[0], x + first);
        if (both) load<V>(value[1], x + second);
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < V; i++) value[j][i] = (value[j][i] - centre[i]) * scale[i] + shift[i];
        store<V>(y + first, value[0]);
        if (both) store<V>(y + second, value[1]);
    }
}

extern "C" __global__ void batch_norm_apply(T* y, const T* x, const float* mean, const float* rstd, const float* weight,
                                            const float* bias, Index rows, int channels) {
    Rows at(channels);
    if (!at.inside) return;
    float centre[V], scale[V], shift[V], factor[V];
    load<V>(centre, mean + at.channel);
    load<V>(scale, rstd + at.channel);
    load<V>(factor, weight + at.channel);
    load<V>(shift, bias + at.channel);
#pragma unroll
    for (int i = 0; i < V; i++) scale[i] *= factor[i];
    affine(y, x, at, rows, channels, centre, scale, shift);
}

extern "C" __global__ void batch_norm_inference(T* y, const T* x, const float* running_mean, const float* running_var,
                                                const float* weight, const float* bias, Index rows, int channels,
                                                float eps) {
    Rows at(channels);
    if (!at.inside) return;
    float centre[V], scale[V], shift[V], variance[V];
    load<V>(centre, running_mean + at.channel);
    load<V>(variance, running_var + at.channel);
    load<V>(scale, weight + at.channel);
    load<V>(shift, bias + at.channel);
#pragma unroll
    for (int i = 0; i < V; i++) scale[i] /= sqrtf(variance[i] + eps);
    affine(y, x, at, rows, channels, centre, scale, shift);
}

// One block: every thread reads the counter before one of them advances it. momentum < 0: cumulative average.
extern "C" __global__ void batch_norm_running(float* running_mean, float* running_var, long long* batches,
                                              const float* mean, const float* rstd, int channels, double eps,
                                              double momentum, double unbias) {
    long long count = *batches + 1;
    double share = momentum < 0 ? 1.0 / (double)count : momentum;
    __syncthreads();
    if (threadIdx.x == 0) *batches = count;
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
        double inverse = rstd[c], biased = 1.0 / (inverse * inverse) - eps;
        biased = biased < 0 ? 0 : biased;
        running_mean[c] = (float)((1 - share) * running_mean[c] + share * mean[c]);
        running_var[c] = (float)((1 - share) * running_var[c] + share * biased * unbias);
    }
}

extern "C" __global__ void batch_norm_backward_weight_partial(float* partials, const T* dy, const T* x,
                                                              const float* mean, Index rows, int channels) {
    int channel = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    float centre[V] = {};
    if (channel < channels) load<V>(centre, mean + channel);
    partial_sums<2>(partials, rows, channels, [&](Index row, int c, float sums[2][V]) {
        float gradient[V], value[V];
        load<V>(gradient, dy + row * channels + c);
        load<V>(value, x + row * channels + c);
#pragma unroll
        for (int i = 0; i < V; i++) {
            sums[0][i] += (value[i] - centre[i]) * gradient[i];
            sums[1][i] += gradient[i];
        }
    });
}

extern "C" __global__ void __launch_bounds__(FINAL_THREADS) batch_norm_backward_weight_final(
    float* d_weight, float* d_bias, const float* rstd, const float* partials, int channels, int blocks) {
    int channel = blockIdx.x * FINAL_CHANNELS + threadIdx.x;
    double sums[2];
    final_sums<2>(partials, blocks, channels, channel, sums);
    if (threadIdx.y != 0 || channel >= channels) return;
    d_weight[channel] = (float)(sums[0] * rstd[channel]);
    d_bias[channel] = (float)sums[1];
}

extern "C" __global__ void batch_norm_backward_data(T* dx, const T* dy, const T* x, const float* mean, const float* rstd,
                                                    const float* weight, const float* d_weight, const float* d_bias,
                                                    Index rows, int channels) {
    Rows at(channels);
    if (!at.inside) return;
    float centre[V], along[V], constant[V], scale[V], slope[V], share = 1.0f / (float)rows;
    load<V>(centre, mean + at.channel);
    load<V>(slope, rstd + at.channel);
    load<V>(scale, weight + at.channel);
    load<V>(along, d_weight + at.channel);
    load<V>(constant, d_bias + at.channel);
#pragma unroll
    for (int i = 0; i < V; i++) {
        scale[i] *= slope[i];
        along[i] *= slope[i] * share;
        constant[i] *= share;
    }
    for (Index row = at.first; row < rows; row += 2 * at.step) {  // two rows at a time, as in affine
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
            for (int i = 0; i < V; i++)
                gradient[j][i] = (gradient[j][i] - ((value[j][i] - centre[i]) * along[i] + constant[i])) * scale[i];
        store<V>(dx + first, gradient[0]);
        if (both) store<V>(dx + second, gradient[1]);
    }
}

// d_bias[c] = sum of dy over rows.
extern "C" __global__ void channel_sum_partial(float* partials, const T* dy, Index rows, int channels) {
    partial_sums<1>(partials, rows, channels, [&](Index row, int c, float sums[1][V]) {
        float gradient[V];
        load<V>(gradient, dy + row * channels + c);
#pragma unroll
        for (int i = 0; i < V; i++) sums[0][i] += gradient[i];
    });
}

extern "C" __global__ void __launch_bounds__(FINAL_THREADS) channel_sum_final(
    T* d_bias, const float* partials, int channels, int blocks, int accumulate) {
    int channel = blockIdx.x * FINAL_CHANNELS + threadIdx.x;
    double sums[1];
    final_sums<1>(partials, blocks, channels, channel, sums);
    if (threadIdx.y != 0 || channel >= channels) return;
    if (accumulate) sums[0] += to_float(d_bias[channel]);
    assign(d_bias[channel], (float)sums[0]);
}

__device__ inline float power(float scale, float beta) {
    if (beta != 0.75f) return powf(scale, -beta);
    float root = sqrtf(scale);
    return 1.0f / (root * sqrtf(root));
}

extern "C" __global__ void lrn_forward(T* y, T* scale, const T* x, Index size, int channels, int window, float alpha,
                                       float beta, float k) {
    Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    int channel = (int)(i % channels), first = channel - window / 2;
    float sum = 0;
    for (int c = first; c < first + window; c++)
        if (c >= 0 && c < channels) {
            float value = to_float(x[i + (c - channel)]);
            sum += value * value;
        }
    float total = k + alpha / window * sum;
    assign(scale[i], total);
    assign(y[i], to_float(x[i]) * power(total, beta));
}

// The windows that hold a channel reach the other way round.
extern "C" __global__ void lrn_backward(T* dx, const T* dy, const T* x, const T* scale, Index size, int channels,
                                        int window, float alpha, float beta) {
    Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    int channel = (int)(i % channels), first = channel - (window - 1 - window / 2);
    float sum = 0;
    for (int c = first; c < first + window; c++)
        if (c >= 0 && c < channels) {
            Index j = i + (c - channel);
            float total = to_float(scale[j]);
            sum += to_float(dy[j]) * to_float(x[j]) * power(total, beta) / total;
        }
    float own = to_float(dy[i]) * power(to_float(scale[i]), beta);
    assign(dx[i], own - 2.0f * alpha * beta / window * to_float(x[i]) * sum);
}
