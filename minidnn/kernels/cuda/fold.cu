// A window's columns become channels: what a convolution of an image's three channels is computed on. And the filter likewise,
// whose columns and channels lie side by side already.

// folded[row, q, j] = x[row, begin(q) + j] for j < taps, else 0; also where that is outside of the row of `length` elements,
// which is one line of an image. begin(q) = q * step - offset. A block makes one row.
extern "C" __global__ void fold_columns(T* folded, const T* x, int length, int outputs, int taps, int channels, int step,
                                        int offset) {
    const T* line = x + (Index)blockIdx.x * length;
    T* target = folded + (Index)blockIdx.x * outputs * channels;
    int packs = channels / V;
    for (int i = threadIdx.x; i < outputs * packs; i += THREADS) {
        int q = i / packs, first = (i - q * packs) * V, at = q * step - offset + first;
        Pack<T, V> pack;
#pragma unroll
        for (int j = 0; j < V; j++) {
            if (first + j < taps && at + j >= 0 && at + j < length) pack.item[j] = line[at + j];
            else assign(pack.item[j], 0.0f);
        }
        put<V>(target + (Index)i * V, pack);
    }
}

// out[row, j] = in[row, j] for j < min(channels_in, channels_out), else 0.
extern "C" __global__ void resize_rows(T* out, const T* in, Index size, int channels_out, int channels_in) {
    Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    Index row = i / channels_out;
    int j = (int)(i - row * channels_out);
    if (j < channels_in) out[i] = in[row * channels_in + j];
    else assign(out[i], 0.0f);
}
