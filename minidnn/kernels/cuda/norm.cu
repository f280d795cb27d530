// Batch normalisation (Ioffe & Szegedy 2015): per channel over all rows; statistics, weight and bias are float.
// Local response normalisation (Krizhevsky et al. 2012): across neighbouring channels.

// Chan, Golub & LeVeque 1983: count, mean and sum of squared deviations of the union of two samples.
template <typename R> __device__ inline void join(R& count, R& mean, R& squares, R count1, R mean1, R squares1) {
    if (count1 == 0) return;
    R total = count + count1, delta = mean1 - mean, share = count1 / total;
    mean += delta * share;
    squares += squares1 + delta * delta * count * share;
    count = total;
}

// One pass over x, and no cancellation: a thread counts deviations from the first value that it sees, so that a large mean
// costs no digits and a thread with an outlier spoils its own share only; then threads and blocks are joined two by two.
constexpr int BUNCH = 4;

extern "C" __global__ void batch_norm_statistics_partial(float* partials, const T* x, Index rows, int channels) {
    __shared__ float shared_mean[THREADS * V], shared_squares[THREADS * V], shared_count[THREADS];
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
    for (int i = 0; i < V; i++) {
        shared_mean[thread * V + i] = mean[i];
        shared_squares[thread * V + i] = squares[i];
    }
    shared_count[thread] = count;
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half) {
            int other = thread + half * blockDim.x;
            float total = count;
#pragma unroll
            for (int i = 0; i < V; i++) {
                total = count;
                join(total, shared_mean[thread * V + i], shared_squares[thread * V + i], shared_count[other],
                     shared_mean[other * V + i], shared_squares[other * V + i]);
            }
            shared_count[thread] = count = total;
        }
    }
    if (threadIdx.y == 0 && at.inside)
#pragma unroll
        for (int i = 0; i < V; i++) {
            partials[((Index)blockIdx.y * 2) * channels + at.channel + i] = shared_mean[thread * V + i];
            partials[((Index)blockIdx.y * 2 + 1) * channels + at.channel + i] = shared_squares[thread * V + i];
        }
}

// The sum of a value over the lanes of a block, in every thread.
__device__ inline double over_lanes(double value, double (*shared)[FINAL_CHANNELS]) {
    __syncthreads();
    shared[threadIdx.y][threadIdx.x] = value;
    __syncthreads();
    double sum = 0;
    for (int lane = 0; lane < FINAL_LANES; lane++) sum += shared[lane][threadIdx.x];
    return sum;
}

// The mean over all blocks, then the squares around it: two short passes without a division. f(channel, mean, variance).
template <typename F> __device__ inline void moments(const float* partials, Index rows, int channels, int blocks, int lanes,
                                                     F f) {
    __shared__ double shared[FINAL_LANES][FINAL_CHANNELS];
    int channel = blockIdx.x * FINAL_CHANNELS + threadIdx.x;
    double sum = 0, squares = 0;
    if (channel < channels)
        for (int block = threadIdx.y; block < blocks; block += FINAL_LANES)
            sum += (double)rows_of_block(rows, block, blocks, lanes) * partials[(Index)block * 2 * channels + channel];
    double centre = over_lanes(sum, shared) / (double)rows;
    if (channel < channels)
        for (int block = threadIdx.y; block < blocks; block += FINAL_LANES) {
            double distance = partials[(Index)block * 2 * channels + channel] - centre;
            squares += partials[((Index)block * 2 + 1) * channels + channel] +
                       (double)rows_of_block(rows, block, blocks, lanes) * distance * distance;
        }
    squares = over_lanes(squares, shared);
    if (threadIdx.y == 0 && channel < channels) f(channel, centre, squares / (double)rows);
}

extern "C" __global__ void batch_norm_statistics_final(float* mean, float* rstd, const float* partials, Index rows,
                                                       int channels, int blocks, int lanes, double eps) {
    moments(partials, rows, channels, blocks, lanes, [&](int channel, double centre, double variance) {
        mean[channel] = (float)centre;
        rstd[channel] = (float)(1.0 / sqrt(variance + eps));
    });
}

// The same, and the running averages: momentum is not negative, so no block needs to know the counter.
extern "C" __global__ void batch_norm_statistics_running_final(
    float* mean, float* rstd, float* running_mean, float* running_var, long long* batches, const float* old_mean,
    const float* old_var, const long long* old_batches, const float* partials, Index rows, int channels, int blocks,
    int lanes, double eps, double momentum, double unbias) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) *batches = *old_batches + 1;
    moments(partials, rows, channels, blocks, lanes, [&](int channel, double centre, double variance) {
        float inverse = (float)(1.0 / sqrt(variance + eps));
        double biased = 1.0 / ((double)inverse * inverse) - eps;  // as the row of its own does, from what it is given
        biased = biased < 0 ? 0 : biased;
        mean[channel] = (float)centre;
        rstd[channel] = inverse;
        running_mean[channel] = (float)((1 - momentum) * old_mean[channel] + momentum * (float)centre);
        running_var[channel] = (float)((1 - momentum) * old_var[channel] + momentum * biased * unbias);
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

extern "C" __global__ void batch_norm_backward_weight_final(float* d_weight, float* d_bias, const float* rstd,
                                                            const float* partials, int channels, int blocks) {
    int channel = blockIdx.x * FINAL_CHANNELS + threadIdx.x;
    double along = final_sum<2>(partials, blocks, channels, channel, 0);
    double total = final_sum<2>(partials, blocks, channels, channel, 1);
    if (threadIdx.y != 0 || channel >= channels) return;
    d_weight[channel] = (float)(along * rstd[channel]);
    d_bias[channel] = (float)total;
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

extern "C" __global__ void channel_sum_final(T* d_bias, const float* partials, int channels, int blocks, int accumulate) {
    int channel = blockIdx.x * FINAL_CHANNELS + threadIdx.x;
    double total = final_sum<1>(partials, blocks, channels, channel, 0);
    if (threadIdx.y != 0 || channel >= channels) return;
    if (accumulate) total += to_float(d_bias[channel]);
    assign(d_bias[channel], (float)total);
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
