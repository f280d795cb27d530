// A convolution as a matrix product: the column matrix has a row for every pixel of the output, and in it the inputs that
// pixel sees, tap by tap (R, S, C). A pack lies within one tap. 32-bit indices: a column matrix is made in parts.

struct Columns {  // x (n, h, w, c), y (n, p, q, ...), the window (r, s)
    int n, h, w, c, p, q, r, s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

// columns[(n, p, q), (r, s, c)] = x[n, u, v, c], zero outside of the image.
extern "C" __global__ void gather_columns(T* columns, const T* x, Index size, Columns at) {
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        unsigned i = (unsigned)first;
        unsigned channel = i % at.c;
        i /= at.c;
        int s = i % at.s;
        i /= at.s;
        int r = i % at.r;
        i /= at.r;
        int q = i % at.q;
        i /= at.q;
        int p = i % at.p, n = i / at.p;
        int u = p * at.stride_h - at.pad_h + r * at.dilation_h;
        int v = q * at.stride_w - at.pad_w + s * at.dilation_w;
        Pack<T, N> pack;
        if (0 <= u && u < at.h && 0 <= v && v < at.w) {
            pack = fetch<N>(x + (((Index)n * at.h + u) * at.w + v) * at.c + channel);
        } else {
#pragma unroll
            for (int j = 0; j < N; j++) assign(pack.item[j], 0.0f);
        }
        put<N>(columns + first, pack);
    });
}

// dx[n, h, w, c] = sum over the taps (r, s), in their order, that saw this pixel, of columns[(n, p, q), (r, s, c)].
extern "C" __global__ void scatter_columns(T* dx, const T* columns, Index size, Columns at) {
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        unsigned i = (unsigned)first;
        unsigned channel = i % at.c;
        i /= at.c;
        int w = i % at.w;
        i /= at.w;
        int h = i % at.h, n = i / at.h;
        float sum[N] = {};
        for (int r = 0; r < at.r; r++) {
            int p = h + at.pad_h - r * at.dilation_h;
            if (p < 0 || p % at.stride_h || p / at.stride_h >= at.p) continue;
            p /= at.stride_h;
            for (int s = 0; s < at.s; s++) {
                int q = w + at.pad_w - s * at.dilation_w;
                if (q < 0 || q % at.stride_w || q / at.stride_w >= at.q) continue;
                q /= at.stride_w;
                float part[N];
                Index row = ((Index)n * at.p + p) * at.q + q;
                load<N>(part, columns + ((row * at.r + r) * at.s + s) * at.c + channel);
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] += part[j];
            }
        }
        store<N>(dx + first, sum);
    });
}
