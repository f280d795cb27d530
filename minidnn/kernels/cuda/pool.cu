// Pooling. Outputs are gathered, never scattered: every element of y or dx is written by one thread, in a fixed order.

struct Window {  // of a pooling: x (N, H, W, C), y (N, P, Q, C)
    int h, w, p, q, c, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
};

// The extents of the window, where the source is compiled for them: divisions by them are then multiplications.
__device__ inline Window fixed(Window s) {
#ifdef KERNEL_H
    s.kernel_h = KERNEL_H, s.kernel_w = KERNEL_W, s.stride_h = STRIDE_H, s.stride_w = STRIDE_W;
    s.pad_h = PAD_H, s.pad_w = PAD_W;
#endif
    return s;
}

struct Place {  // image, row, column and first channel of a thread's pack: a block works on one row (blockIdx.x) of one image
    Index image;
    int row, column, channel;
    bool inside;
    __device__ Place(int rows, int columns, int channels) {
        unsigned pack = blockIdx.y * blockDim.x + threadIdx.x, packs = channels / V;
        image = blockIdx.x / (unsigned)rows;
        row = (int)(blockIdx.x % (unsigned)rows);
        column = (int)(pack / packs);
        channel = (int)(pack % packs) * V;
        inside = column < columns;
    }
};

__device__ inline Index at(Index image, int row, int column, int rows, int columns, int channels) {
    return ((image * rows + row) * columns + column) * channels;
}

template <bool WITH_INDEX> __device__ inline void max_pool(T* y, Byte* index, const T* x, Window s) {
    Place out(s.p, s.q, s.c);
    if (!out.inside) return;
    float best[V];
    Byte where[V];
#pragma unroll
    for (int i = 0; i < V; i++) best[i] = LOWEST, where[i] = 0;
    for (int r = 0; r < s.kernel_h; r++) {
        int h = out.row * s.stride_h - s.pad_h + r;
        if (h < 0 || h >= s.h) continue;
        for (int t = 0; t < s.kernel_w; t++) {
            int w = out.column * s.stride_w - s.pad_w + t;
            if (w < 0 || w >= s.w) continue;
            float value[V];
            load<V>(value, x + at(out.image, h, w, s.h, s.w, s.c) + out.channel);
#pragma unroll
            for (int i = 0; i < V; i++)
                if (value[i] > best[i] || (value[i] != value[i] && best[i] == best[i])) {  // the first NaN wins
                    best[i] = value[i];
                    where[i] = (Byte)(r * s.kernel_w + t);
                }
        }
    }
    Index place = at(out.image, out.row, out.column, s.p, s.q, s.c) + out.channel;
    store<V>(y + place, best);
    if (WITH_INDEX) {
        Pack<Byte, V> pack;
#pragma unroll
        for (int i = 0; i < V; i++) pack.item[i] = where[i];
        put<V>(index + place, pack);
    }
}

extern "C" __global__ void max_pool_forward(T* y, Byte* index, const T* x, Window s) {
    max_pool<true>(y, index, x, fixed(s));
}

extern "C" __global__ void max_pool_inference(T* y, const T* x, Window s) {
    max_pool<false>(y, nullptr, x, fixed(s));
}

// Outputs p whose window of `kernel` from p * stride - pad holds position `at`: first .. last.
__device__ inline void holders(int position, int pad, int kernel, int stride, int outputs, int& first, int& last) {
    int shifted = position + pad;
    first = shifted < kernel ? 0 : (shifted - kernel) / stride + 1;
    last = min(outputs - 1, shifted / stride);
}

// f(offset of the window's output, tap) for every window that holds the thread's element of x.
template <typename F> __device__ inline void each_window(const Place& in, const Window& s, F f) {
    int p0, p1, q0, q1;
    holders(in.row, s.pad_h, s.kernel_h, s.stride_h, s.p, p0, p1);
    holders(in.column, s.pad_w, s.kernel_w, s.stride_w, s.q, q0, q1);
    for (int p = p0; p <= p1; p++)
        for (int q = q0; q <= q1; q++) {
            int r = in.row + s.pad_h - p * s.stride_h, t = in.column + s.pad_w - q * s.stride_w;
            f(at(in.image, p, q, s.p, s.q, s.c) + in.channel, r * s.kernel_w + t);
        }
}

// How many rows and columns of dx a thread makes: those between two windows see much the same ones.
#ifdef KERNEL_H
constexpr int TILE_H = STRIDE_H > 1 ? 2 : 1, TILE_W = STRIDE_W > 1 ? 2 : 1;
#else
constexpr int TILE_H = 1, TILE_W = 1;
#endif

extern "C" __global__ void max_pool_backward(T* dx, const T* dy, const Byte* index, Window window) {
    Window s = fixed(window);
    Place tile((s.h + TILE_H - 1) / TILE_H, (s.w + TILE_W - 1) / TILE_W, s.c);
    if (!tile.inside) return;
    int row = tile.row * TILE_H, column = tile.column * TILE_W, p0, p1, q0, q1, other;
    holders(row, s.pad_h, s.kernel_h, s.stride_h, s.p, p0, other);
    holders(min(row + TILE_H, s.h) - 1, s.pad_h, s.kernel_h, s.stride_h, s.p, other, p1);
    holders(column, s.pad_w, s.kernel_w, s.stride_w, s.q, q0, other);
    holders(min(column + TILE_W, s.w) - 1, s.pad_w, s.kernel_w, s.stride_w, s.q, other, q1);
    float sum[TILE_H][TILE_W][V] = {};
    for (int p = p0; p <= p1; p++)
        for (int q = q0; q <= q1; q++) {
            Index place = at(tile.image, p, q, s.p, s.q, s.c) + tile.channel;
            float gradient[V];
            load<V>(gradient, dy + place);
            Pack<Byte, V> chosen = fetch<V>(index + place);
#pragma unroll
            for (int a = 0; a < TILE_H; a++)
#pragma unroll
                for (int b = 0; b < TILE_W; b++) {
                    int r = row + a + s.pad_h - p * s.stride_h, t = column + b + s.pad_w - q * s.stride_w;
                    bool held = 0 <= r && r < s.kernel_h && 0 <= t && t < s.kernel_w;
                    int tap = held ? r * s.kernel_w + t : -1;
#pragma unroll
                    for (int i = 0; i < V; i++) sum[a][b][i] += chosen.item[i] == tap ? gradient[i] : 0.0f;
                }
        }
#pragma unroll
    for (int a = 0; a < TILE_H; a++)
#pragma unroll
        for (int b = 0; b < TILE_W; b++)
            if (row + a < s.h && column + b < s.w)
                store<V>(dx + at(tile.image, row + a, column + b, s.h, s.w, s.c) + tile.channel, sum[a][b]);
}

// The same where the windows lie side by side and cover x: a thread writes all of one window.
extern "C" __global__ void max_pool_backward_tiles(T* dx, const T* dy, const Byte* index, Window window) {
    Window s = fixed(window);
    Place out(s.p, s.q, s.c);
    if (!out.inside) return;
    Index place = at(out.image, out.row, out.column, s.p, s.q, s.c) + out.channel;
    Pack<T, V> gradient = fetch<V>(dy + place), zero = {};
    Pack<Byte, V> chosen = fetch<V>(index + place);
    for (int r = 0; r < s.kernel_h; r++)
        for (int t = 0; t < s.kernel_w; t++) {
            Pack<T, V> pack;
#pragma unroll
            for (int i = 0; i < V; i++) pack.item[i] = chosen.item[i] == r * s.kernel_w + t ? gradient.item[i] : zero.item[i];
            put<V>(dx + at(out.image, out.row * s.kernel_h + r, out.column * s.kernel_w + t, s.h, s.w, s.c) + out.channel, pack);
        }
}

__device__ inline void window_sum(float sum[V], const T* x, Index image, int row, int column, int channel, const Window& s) {
#pragma unroll
    for (int i = 0; i < V; i++) sum[i] = 0;
    for (int r = 0; r < s.kernel_h; r++) {
        int h = row * s.stride_h - s.pad_h + r;
        if (h < 0 || h >= s.h) continue;
        for (int t = 0; t < s.kernel_w; t++) {
            int w = column * s.stride_w - s.pad_w + t;
            if (w < 0 || w >= s.w) continue;
            float value[V];
            load<V>(value, x + at(image, h, w, s.h, s.w, s.c) + channel);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += value[i];
        }
    }
}

extern "C" __global__ void avg_pool_forward(T* y, const T* x, Window s) {
    Place out(s.p, s.q, s.c);
    if (!out.inside) return;
    float sum[V], area = (float)(s.kernel_h * s.kernel_w);
    window_sum(sum, x, out.image, out.row, out.column, out.channel, s);
#pragma unroll
    for (int i = 0; i < V; i++) sum[i] /= area;
    store<V>(y + at(out.image, out.row, out.column, s.p, s.q, s.c) + out.channel, sum);
}

extern "C" __global__ void avg_pool_backward(T* dx, const T* dy, Window s) {
    Place in(s.h, s.w, s.c);
    if (!in.inside) return;
    float sum[V] = {}, area = (float)(s.kernel_h * s.kernel_w);
    each_window(in, s, [&](Index place, int) {
        float gradient[V];
        load<V>(gradient, dy + place);
#pragma unroll
        for (int i = 0; i < V; i++) sum[i] += gradient[i] / area;
    });
    store<V>(dx + at(in.image, in.row, in.column, s.h, s.w, s.c) + in.channel, sum);
}

// A block sums the map of one image (blockIdx.y) for its channels; its rows of threads are joined two by two.
extern "C" __global__ void global_avg_pool_forward(T* y, const T* x, int positions, int channels) {
    __shared__ float shared[THREADS * V];
    int channel = (blockIdx.x * blockDim.x + threadIdx.x) * V;
    int thread = threadIdx.y * blockDim.x + threadIdx.x;
    Index image = blockIdx.y;
    float sum[V] = {};
    if (channel < channels)
#pragma unroll 8
        for (int i = threadIdx.y; i < positions; i += blockDim.y) {
            float value[V];
            load<V>(value, x + (image * positions + i) * channels + channel);
#pragma unroll
            for (int j = 0; j < V; j++) sum[j] += value[j];
        }
#pragma unroll
    for (int j = 0; j < V; j++) shared[thread * V + j] = sum[j];
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half)
#pragma unroll
            for (int j = 0; j < V; j++) shared[thread * V + j] += shared[(thread + half * blockDim.x) * V + j];
    }
    if (threadIdx.y != 0 || channel >= channels) return;
#pragma unroll
    for (int j = 0; j < V; j++) sum[j] = shared[thread * V + j] / (float)positions;
    store<V>(y + image * channels + channel, sum);
}

extern "C" __global__ void global_avg_pool_backward(T* dx, const T* dy, int positions, int channels) {
    Place in(positions, 1, channels);
    if (!in.inside) return;
    float gradient[V];
    load<V>(gradient, dy + in.image * channels + in.channel);
#pragma unroll
    for (int i = 0; i < V; i++) gradient[i] /= (float)positions;
    store<V>(dx + (in.image * positions + in.row) * channels + in.channel, gradient);
}

extern "C" __global__ void subsample_forward(T* y, const T* x, const T* weight, const T* bias, Window s) {
    Place out(s.p, s.q, s.c);
    if (!out.inside) return;
    float sum[V], scale[V], shift[V];
    window_sum(sum, x, out.image, out.row, out.column, out.channel, s);
    load<V>(scale, weight + out.channel);
    load<V>(shift, bias + out.channel);
#pragma unroll
    for (int i = 0; i < V; i++) sum[i] = sum[i] * scale[i] + shift[i];
    store<V>(y + at(out.image, out.row, out.column, s.p, s.q, s.c) + out.channel, sum);
}

extern "C" __global__ void subsample_backward_data(T* dx, const T* dy, const T* weight, Window s) {
    Place in(s.h, s.w, s.c);
    if (!in.inside) return;
    float sum[V] = {}, scale[V];
    load<V>(scale, weight + in.channel);
    each_window(in, s, [&](Index place, int) {
        float gradient[V];
        load<V>(gradient, dy + place);
#pragma unroll
        for (int i = 0; i < V; i++) sum[i] += gradient[i] * scale[i];
    });
    store<V>(dx + at(in.image, in.row, in.column, s.h, s.w, s.c) + in.channel, sum);
}

extern "C" __global__ void subsample_backward_weight_partial(float* partials, const T* dy, const T* x, Index images,
                                                             Window s) {
    partial_sums<2>(partials, images * s.p * s.q, s.c, [&](Index row, int c, float sums[2][V]) {
        int column = (int)(row % s.q), line = (int)(row / s.q % s.p);
        float window[V], gradient[V];
        window_sum(window, x, row / s.q / s.p, line, column, c, s);
        load<V>(gradient, dy + row * s.c + c);
#pragma unroll
        for (int i = 0; i < V; i++) {
            sums[0][i] += window[i] * gradient[i];
            sums[1][i] += gradient[i];
        }
    });
}

extern "C" __global__ void __launch_bounds__(FINAL_THREADS) subsample_backward_weight_final(
    T* d_weight, T* d_bias, const float* partials, int channels, int blocks) {
    int channel = blockIdx.x * FINAL_CHANNELS + threadIdx.x;
    double sums[2];
    final_sums<2>(partials, blocks, channels, channel, sums);
    if (threadIdx.y != 0 || channel >= channels) return;
    assign(d_weight[channel], (float)sums[0]);
    assign(d_bias[channel], (float)sums[1]);
}
