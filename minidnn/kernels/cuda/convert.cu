// y = x in another type, by way of float. KIND is 0 here; FROM and TO are the two types.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename E> __device__ inline float widen(E value) { return (float)value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
template <typename E> __device__ inline void narrow(E& target, float value) { target = (E)value; }
__device__ inline void narrow(__half& target, float value) { target = __float2half_rn(value); }
__device__ inline void narrow(__nv_bfloat16& target, float value) { target = __float2bfloat16_rn(value); }

extern "C" __global__ void convert(TO* y, const FROM* x, Index size) {
    each_pack(size, [=](Index first, auto width) {
        constexpr int N = decltype(width)::value;
        Pack<FROM, N> source = fetch<N>(x + first);
        Pack<TO, N> target;
#pragma unroll
        for (int i = 0; i < N; i++) narrow(target.item[i], widen(source.item[i]));
        put<N>(y + first, target);
    });
}
