// Softmax with cross-entropy. Probabilities and loss are float, logits and their gradient have the element type, labels
// are LABEL, an integer type.

constexpr int LOSS_THREADS = 128;

// The sum, or maximum, over the block, the same value in every thread. Joined two by two.
template <bool MAXIMUM> __device__ inline float block_reduce(float value, float* shared) {
    __syncthreads();
    shared[threadIdx.x] = value;
    for (int half = LOSS_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            float other = shared[threadIdx.x + half];
            shared[threadIdx.x] = MAXIMUM ? fmaxf(shared[threadIdx.x], other) : shared[threadIdx.x] + other;
        }
    }
    __syncthreads();
    return shared[0];
}

// A block takes every gridDim.x-th sample and leaves the sum of their losses.
extern "C" __global__ void softmax_forward_partial(double* partials, float* probabilities, const T* logits,
                                                   const LABEL* labels, int samples, int classes, double smoothing) {
    __shared__ float shared[LOSS_THREADS];
    double total = 0;
    for (int n = blockIdx.x; n < samples; n += gridDim.x) {
        const T* z = logits + (Index)n * classes;
        float* p = probabilities + (Index)n * classes;
        float top = LOWEST, norm = 0, sum = 0;
        for (int k = threadIdx.x; k < classes; k += LOSS_THREADS) {
            float value = to_float(z[k]);
            top = value > top || value != value ? value : top;
        }
        top = block_reduce<true>(top, shared);
        for (int k = threadIdx.x; k < classes; k += LOSS_THREADS) {
            float shifted = to_float(z[k]) - top, exponential = expf(shifted);
            p[k] = exponential;
            norm += exponential;
            sum += shifted;
        }
        norm = block_reduce<false>(norm, shared);
        if (smoothing > 0) sum = block_reduce<false>(sum, shared);
        for (int k = threadIdx.x; k < classes; k += LOSS_THREADS) p[k] /= norm;
        double chosen = to_float(z[labels[n]]) - top;
        total += log((double)norm) - (1 - smoothing) * chosen - (smoothing > 0 ? smoothing * sum / classes : 0.0);
    }
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

extern "C" __global__ void softmax_forward_final(float* loss, const double* partials, int blocks, int samples) {
    __shared__ double shared[LOSS_THREADS];
    double total = 0;
    for (int i = threadIdx.x; i < blocks; i += LOSS_THREADS) total += partials[i];
    shared[threadIdx.x] = total;
    for (int half = LOSS_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *loss = (float)(shared[0] / samples);
}

// d_logits may be probabilities: each thread reads its element before it writes it.
extern "C" __global__ void softmax_backward(T* d_logits, const float* probabilities, const LABEL* labels,
                                            const float* scalars, int loss_weight, Index size, int classes,
                                            double smoothing) {
    Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    float gradient = probabilities[i] - (float)(smoothing / classes);
    if ((LABEL)(i % classes) == labels[i / classes]) gradient -= (float)(1 - smoothing);
    assign(d_logits[i], gradient * scalars[loss_weight]);
}
