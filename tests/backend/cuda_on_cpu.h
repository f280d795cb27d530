// Enough of CUDA to run its kernels on a CPU, a block at a time: its threads are fibres that take turns at __syncthreads.
// `seed` permutes blocks, and the order in which threads run between two barriers, so that what depends on either shows.
// Not shown: memory that two blocks share at once, and warps.
#include <math.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __global__ static
#define __shared__ static
#define __launch_bounds__(threads)

using std::min;

struct Extent { unsigned x, y, z; };
Extent threadIdx, blockIdx, blockDim, gridDim;

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((std::uint64_t)a * b) >> 32); }

template <typename To, typename From> inline To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "bits of one size");
    To other;
    std::memcpy(&other, &value, sizeof other);
    return other;
}
inline float __int_as_float(unsigned bits) { return same_bits<float>(bits); }

// The 16-bit types, which are only stored: rounded to nearest, ties to even (IEEE 754; bfloat16 is the upper half of a float).
struct __half { std::uint16_t bits; };
struct __nv_bfloat16 { std::uint16_t bits; };

inline float __half2float(__half value) {
    unsigned magnitude = same_bits<unsigned>(__int_as_float((value.bits & 0x7fffu) << 13) * 0x1p112f);
    if ((value.bits & 0x7c00u) == 0x7c00u) magnitude |= 0x7f800000u;
    return __int_as_float(magnitude | (value.bits & 0x8000u) << 16);
}

inline __half __float2half_rn(float value) {
    unsigned all = same_bits<unsigned>(value), magnitude = all & 0x7fffffffu, half;
    if (magnitude > 0x7f800000u) half = 0x7e00u;
    else if (magnitude >= 0x47800000u) half = 0x7c00u;
    else if (magnitude >= 0x38800000u) half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
    else half = same_bits<unsigned>(__int_as_float(magnitude) + 0.5f) - 0x3f000000u;  // the addition rounds it
    return {(std::uint16_t)(half | (all >> 16 & 0x8000u))};
}

inline float __bfloat162float(__nv_bfloat16 value) { return __int_as_float((unsigned)value.bits << 16); }

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    unsigned all = same_bits<unsigned>(value);
    if (value != value) return {(std::uint16_t)(all >> 16 | 0x40u)};
    return {(std::uint16_t)((all + 0x7fffu + (all >> 16 & 1)) >> 16)};
}

// A fibre is entered once and runs the body whenever it is asked to. Jumps switch, because they leave the signal mask alone.
struct Fibre {
    std::unique_ptr<char[]> stack;
    jmp_buf place;
    bool done;
};
static std::vector<Fibre> fibres;
static unsigned running;
static jmp_buf scheduler;
static void (*body)(void**);
static void** arguments;

static __attribute__((noinline)) void leave() {
    if (!_setjmp(fibres[running].place)) _longjmp(scheduler, 1);
}

static __attribute__((noinline)) void enter(unsigned fibre) {
    running = fibre;
    if (!_setjmp(scheduler)) _longjmp(fibres[fibre].place, 1);
}

static void live() {
    for (;;) {
        leave();
        body(arguments);
        fibres[running].done = true;
    }
}

static __attribute__((noinline)) void born(ucontext_t* context) {
    if (!_setjmp(scheduler)) setcontext(context);
}

static void need_fibres(unsigned threads) {
    constexpr std::size_t bytes = 1 << 16;
    if (fibres.size() >= threads) return;
    static ucontext_t context;
    running = (unsigned)fibres.size();
    for (fibres.resize(threads); running < threads; running++) {
        fibres[running].stack.reset(new char[bytes]);
        getcontext(&context);
        context.uc_stack.ss_sp = fibres[running].stack.get();
        context.uc_stack.ss_size = bytes;
        makecontext(&context, live, 0);
        born(&context);
    }
}

void __syncthreads() { leave(); }

static void run_block(std::vector<unsigned>& order, std::mt19937& random) {
    for (unsigned t : order) fibres[t].done = false;
    for (bool alive = true; alive;) {
        alive = false;
        std::shuffle(order.begin(), order.end(), random);
        for (unsigned t : order) {
            if (fibres[t].done) continue;
            threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
            enter(t);
            alive = alive || !fibres[t].done;
        }
    }
}

static void launch(void (*call)(void**), void** values, const unsigned* shape, unsigned seed) {
    body = call;
    arguments = values;
    gridDim = {shape[0], shape[1], shape[2]};
    blockDim = {shape[3], shape[4], shape[5]};
    std::vector<unsigned> blocks(gridDim.x * gridDim.y * gridDim.z), threads(blockDim.x * blockDim.y * blockDim.z);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::iota(threads.begin(), threads.end(), 0);
    need_fibres((unsigned)threads.size());
    std::mt19937 random(seed);
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (unsigned b : blocks) {
        blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / (gridDim.x * gridDim.y)};
        run_block(threads, random);
    }
}

template <auto kernel> struct Entry;  // Entry<kernel>::call unpacks the arguments of a launch
template <typename... A, void (*kernel)(A...)> struct Entry<kernel> {
    template <std::size_t... I> static void unpack(void** values, std::index_sequence<I...>) {
        kernel(*static_cast<A*>(values[I])...);
    }
    static void call(void** values) { unpack(values, std::index_sequence_for<A...>()); }
};
