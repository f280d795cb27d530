// Element-wise functions, type conversion, dropout, and copies of channels.

extern "C" __global__ void relu_forward(T* y, const T* x, Index size) {
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        float value[N];
        load<N>(value, x + first);
#pragma unroll
        for (int i = 0; i < N; i++) value[i] = value[i] <= 0.0f ? 0.0f : value[i];  // NaN stays NaN
        store<N>(y + first, value);
    });
}

extern "C" __global__ void relu_backward(T* dx, const T* dy, const T* y, Index size) {
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        float value[N], output[N];
        load<N>(value, dy + first);
        load<N>(output, y + first);
#pragma unroll
        for (int i = 0; i < N; i++) value[i] = output[i] > 0.0f ? value[i] : 0.0f;
        store<N>(dx + first, value);
    });
}

extern "C" __global__ void tanh_forward(T* y, const T* x, Index size, float amplitude, float slope) {
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        float value[N];
        load<N>(value, x + first);
#pragma unroll
        for (int i = 0; i < N; i++) value[i] = amplitude * tanhf(slope * value[i]);
        store<N>(y + first, value);
    });
}

extern "C" __global__ void tanh_backward(T* dx, const T* dy, const T* y, Index size, float amplitude, float slope) {
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        float value[N], output[N];
        load<N>(value, dy + first);
        load<N>(output, y + first);
#pragma unroll
        for (int i = 0; i < N; i++) value[i] *= slope * (amplitude - output[i] * output[i] / amplitude);
        store<N>(dx + first, value);
    });
}

extern "C" __global__ void add_forward(T* y, const T* x0, const T* x1, Index size) {
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        float value[N], other[N];
        load<N>(value, x0 + first);
        load<N>(other, x1 + first);
#pragma unroll
        for (int i = 0; i < N; i++) value[i] += other[i];
        store<N>(y + first, value);
    });
}

// Philox4x32-10 (Salmon et al. 2011): four random words of one counter.
__device__ inline void philox(unsigned word[4], unsigned key0, unsigned key1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned high0 = __umulhi(0xD2511F53u, word[0]), low0 = 0xD2511F53u * word[0];
        unsigned high1 = __umulhi(0xCD9E8D57u, word[2]), low1 = 0xCD9E8D57u * word[2];
        word[0] = high1 ^ word[1] ^ key0;
        word[1] = low1;
        word[2] = high0 ^ word[3] ^ key1;
        word[3] = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// One thread makes the four words of one counter and applies them to four elements.
extern "C" __global__ void dropout(T* y, const T* x, const unsigned* counters, Index size, unsigned node,
                                   unsigned long long threshold, float scale) {
    Index counter = (Index)blockIdx.x * THREADS + threadIdx.x, first = counter * 4;
    if (first >= size) return;
    unsigned word[4] = {(unsigned)counter, node, counters[0], counters[1]};
    philox(word, counters[2], counters[3]);
    float value[4];
    if (V > 1 && first + 4 <= size) {
        load<4>(value, x + first);
#pragma unroll
        for (int i = 0; i < 4; i++) value[i] = word[i] >= threshold ? value[i] * scale : 0.0f;
        store<4>(y + first, value);
    } else {
        for (int i = 0; i < 4 && first + i < size; i++)
            assign(y[first + i], word[i] >= threshold ? to_float(x[first + i]) * scale : 0.0f);
    }
}

// target[row, c] = source[row, c] for c < channels; the addresses are those of the first channel.
extern "C" __global__ void copy_channels(T* target, const T* source, Index rows, int channels, Index target_stride,
                                         Index source_stride) {
    Rows at(channels);
    if (!at.inside) return;
    for (Index row = at.first; row < rows; row += at.step) {
        put<V>(target + row * target_stride + at.channel, fetch<V>(source + row * source_stride + at.channel));
    }
}

// y += bias[channel], and with RELU what is below zero becomes zero.
template <bool RELU>
__device__ inline void add_bias(T* y, const T* bias, Index rows, int channels) {
    Rows at(channels);
    if (!at.inside) return;
    float shift[V], value[V];
    load<V>(shift, bias + at.channel);
    for (Index row = at.first; row < rows; row += at.step) {
        T* place = y + row * channels + at.channel;
        load<V>(value, place);
#pragma unroll
        for (int i = 0; i < V; i++) {
            value[i] += shift[i];
            if (RELU) value[i] = value[i] <= 0.0f ? 0.0f : value[i];  // NaN stays NaN
        }
        store<V>(place, value);
    }
}

extern "C" __global__ void bias_add(T* y, const T* bias, Index rows, int channels) { add_bias<false>(y, bias, rows, channels); }

extern "C" __global__ void bias_relu(T* y, const T* bias, Index rows, int channels) { add_bias<true>(y, bias, rows, channels); }
