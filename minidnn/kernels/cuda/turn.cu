// A filter for a forward convolution that is computed as the gradient of another one's image.

// turned[c, tap, k] = filter[k, taps - 1 - tap, c]: inputs and outputs exchanged, the window read from its end.
extern "C" __global__ void turn_filter(T* turned, const T* filter, Index size, int inputs, int taps, int outputs) {
    Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    Index row = i / outputs;
    int k = (int)(i - row * outputs), c = (int)(row / taps), tap = (int)(row - (Index)c * taps);
    turned[i] = filter[((Index)k * taps + taps - 1 - tap) * inputs + c];
}
