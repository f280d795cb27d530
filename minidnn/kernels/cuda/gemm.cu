// Products in float arithmetic, for what the library refuses: matrices, and convolutions as products whose operands are
// gathered on the fly (no column matrix in memory). One block makes a 64 x 64 tile of the result; no split of the sum, so
// no partial results and one fixed order. Correct everywhere, and not fast.

constexpr int TILE = 64;
constexpr int DEPTH = 16;
constexpr int EACH = 4;  // a thread's share of the tile is 4 x 4

struct Shape {  // of a convolution: x (n, h, w, c), y (n, p, q, k), weight (k, r, s, c / groups)
    int n, h, w, c, p, q, k, r, s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
};

// result(m, n) = sum over k of a(m, k) * b(k, n). `fast`: neighbouring threads load neighbouring k.
template <typename A, typename B, typename C>
__device__ inline void product(Index rows, int columns, Index depth, bool a_fast, bool b_fast, A a, B b, C result) {
    __shared__ float left[DEPTH][TILE + 1], right[DEPTH][TILE + 1];
    int thread = threadIdx.x, x = thread % 16, y = thread / 16;
    Index row0 = (Index)blockIdx.x * TILE;
    int column0 = blockIdx.y * TILE;
    float sum[EACH][EACH] = {};
    for (Index k0 = 0; k0 < depth; k0 += DEPTH) {
#pragma unroll
        for (int j = 0; j < TILE * DEPTH / THREADS; j++) {
            int i = thread + j * THREADS;
            int depth_a = a_fast ? i % DEPTH : i / TILE, row = a_fast ? i / DEPTH : i % TILE;
            int depth_b = b_fast ? i % DEPTH : i / TILE, column = b_fast ? i / DEPTH : i % TILE;
            left[depth_a][row] = row0 + row < rows && k0 + depth_a < depth ? a(row0 + row, k0 + depth_a) : 0.0f;
            right[depth_b][column] =
                column0 + column < columns && k0 + depth_b < depth ? b(k0 + depth_b, column0 + column) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float l[EACH], r[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) l[i] = left[k][y + 16 * i], r[i] = right[k][x + 16 * i];
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) sum[i][j] += l[i] * r[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            Index row = row0 + y + 16 * i;
            int column = column0 + x + 16 * j;
            if (row < rows && column < columns) result(row, column, sum[i][j]);
        }
}

// c (rows, columns) = a @ b, given by the strides of a (rows, depth) and b (depth, columns).
extern "C" __global__ void matrix_product(T* c, const T* a, const T* b, Index rows, int columns, Index depth, Index a_row,
                                          Index a_depth, Index b_depth, Index b_column, int accumulate) {
    product(
        rows, columns, depth, a_depth == 1, b_depth == 1,
        [=](Index m, Index k) { return to_float(a[m * a_row + k * a_depth]); },
        [=](Index k, int n) { return to_float(b[k * b_depth + n * b_column]); },
        [=](Index m, int n, float sum) {
            T& target = c[m * columns + n];
            assign(target, accumulate ? to_float(target) + sum : sum);
        });
}

__device__ inline float element(const T* x, const Shape& s, Index position, int r, int t, int channel) {
    int q = (int)(position % s.q), p = (int)(position / s.q % s.p);
    Index n = position / s.q / s.p;
    int h = p * s.stride_h - s.pad_h + r * s.dilation_h, w = q * s.stride_w - s.pad_w + t * s.dilation_w;
    if (h < 0 || h >= s.h || w < 0 || w >= s.w) return 0.0f;
    return to_float(x[((n * s.h + h) * s.w + w) * s.c + channel]);
}

// blockIdx.z is the group. Rows: output positions; columns: output channels; depth: taps and input channels.
extern "C" __global__ void conv2d_forward(T* y, const T* x, const T* weight, Shape s) {
    int share = s.c / s.groups, outputs = s.k / s.groups, group = blockIdx.z, depth = s.r * s.s * share;
    product(
        (Index)s.n * s.p * s.q, outputs, depth, true, true,
        [=](Index m, Index k) {
            int tap = (int)k / share;
            return element(x, s, m, tap / s.s, tap % s.s, group * share + (int)k % share);
        },
        [=](Index k, int n) { return to_float(weight[(Index)(group * outputs + n) * depth + k]); },
        [=](Index m, int n, float sum) { assign(y[m * s.k + group * outputs + n], sum); });
}

// Rows: positions of x; columns: input channels; depth: taps and output channels.
extern "C" __global__ void conv2d_backward_data(T* dx, const T* dy, const T* weight, Shape s) {
    int share = s.c / s.groups, outputs = s.k / s.groups, group = blockIdx.z;
    product(
        (Index)s.n * s.h * s.w, share, (Index)s.r * s.s * outputs, true, false,
        [=](Index m, Index k) {
            int tap = (int)k / outputs, channel = group * outputs + (int)k % outputs;
            int w = (int)(m % s.w), h = (int)(m / s.w % s.h);
            int up = h + s.pad_h - tap / s.s * s.dilation_h, left = w + s.pad_w - tap % s.s * s.dilation_w;
            if (up < 0 || left < 0 || up % s.stride_h || left % s.stride_w) return 0.0f;
            int p = up / s.stride_h, q = left / s.stride_w;
            if (p >= s.p || q >= s.q) return 0.0f;
            return to_float(dy[((m / s.w / s.h * s.p + p) * s.q + q) * s.k + channel]);
        },
        [=](Index k, int n) {
            int tap = (int)k / outputs, channel = group * outputs + (int)k % outputs;
            return to_float(weight[((Index)channel * s.r * s.s + tap) * share + n]);
        },
        [=](Index m, int n, float sum) { assign(dx[m * s.c + group * share + n], sum); });
}

// Rows: output channels; columns: taps and input channels; depth: output positions.
extern "C" __global__ void conv2d_backward_weight(T* d_weight, const T* x, const T* dy, Shape s, int accumulate) {
    int share = s.c / s.groups, outputs = s.k / s.groups, group = blockIdx.z, columns = s.r * s.s * share;
    product(
        outputs, columns, (Index)s.n * s.p * s.q, false, false,
        [=](Index m, Index k) { return to_float(dy[k * s.k + group * outputs + m]); },
        [=](Index k, int n) {
            int tap = n / share;
            return element(x, s, k, tap / s.s, tap % s.s, group * share + n % share);
        },
        [=](Index m, int n, float sum) {
            T& target = d_weight[(group * outputs + m) * columns + n];
            assign(target, accumulate ? to_float(target) + sum : sum);
        });
}
