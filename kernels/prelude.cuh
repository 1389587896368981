// Shared by all kernels: types without CUDA headers, reductions in one fixed order, and the
// report of an index out of range. This file is the only place with inline assembly.
//
// Promises: every function is force-inlined; collectives take the mask of the lanes that call them;
// a sum is added up in an order that depends on its length and on the number of threads alone, so
// two runs give the same bits.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

constexpr u32 ALL_LANES = 0xffffffffu;

// Whether two types are one.
template <class A, class B> struct Alike {
    static constexpr bool value = false;
};
template <class A> struct Alike<A, A> {
    static constexpr bool value = true;
};

DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
// Rounded each for itself, never joined.
DEVICE float product_of(float a, float b) { return __fmul_rn(a, b); }
DEVICE float difference_of(float a, float b) { return __fsub_rn(a, b); }

// --- storage types -------------------------------------------------------------------------------

struct bf16 {
    u16 bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

DEVICE void store(float &to, float x) { to = x; }
DEVICE void store(bf16 &to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

// The same number, opaque to the compiler: a value computed from it is computed where it is needed,
// and takes no register before.
DEVICE int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Bits of a word under a mask, and others: one instruction where `others` is a register.
DEVICE u32 masked(u32 word, u32 mask, u32 others) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(word), "r"(mask), "r"(others));
    return y;
}

// A number in binary16, in the lower half.
DEVICE float half_float(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(u16(bits)));
    return x;
}

// --- shared memory and tensor cores --------------------------------------------------------------

DEVICE u32 shared_address(const void *pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// `bytes` (at most 16) into shared memory asynchronously, then zeros up to 16; both sides aligned
// to 16 bytes.
DEVICE void copy_async_to(u32 shared, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
}
DEVICE void copy_async(void *to, const void *from, int bytes) { copy_async_to(shared_address(to), from, bytes); }

// A float, or zero.
DEVICE void copy_async(float *to, const float *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0)
                 : "memory");
}

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `N` groups of this thread are under way.
template <int N> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Four matrices of 8 x 8; lane `i` gives the address of row `i % 8` of matrix `i / 8`.
DEVICE void load_matrices(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

DEVICE void load_matrices_transposed(u32 (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Two floats as a pair of bf16, `low` in the low half.
DEVICE u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// `a · b + c` of pairs of bf16.
DEVICE u32 fma_pairs(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Two adjacent elements at once; their address is a multiple of their size.
struct __align__(8) TwoFloats {
    float low, high;
};
DEVICE TwoFloats load_pair(const float *from) { return *reinterpret_cast<const TwoFloats *>(from); }
DEVICE TwoFloats load_pair(const bf16 *from) {
    u32 pair = *reinterpret_cast<const u32 *>(from);
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
DEVICE void store_pair(float *to, float low, float high) { *reinterpret_cast<TwoFloats *>(to) = {low, high}; }
DEVICE void store_pair(bf16 *to, float low, float high) { *reinterpret_cast<u32 *>(to) = pack(low, high); }

// The left operand of a product, 16 x 16, from two pieces of 16 x 8 as products give them.
DEVICE void fragment(u32 (&a)[4], const float (&low)[4], const float (&high)[4]) {
    a[0] = pack(low[0], low[1]), a[1] = pack(low[2], low[3]);
    a[2] = pack(high[0], high[1]), a[3] = pack(high[2], high[3]);
}

// `c += a · b`, `a` 16 x 16 and `b` 16 x 8; sums in f32.
DEVICE void multiply_matrices(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- places --------------------------------------------------------------------------------------

// Blocks run along x alone, because only x may be long; the coordinates are taken apart here.
DEVICE u32 take(u32 &rest, u32 extent) {
    u32 at = rest % extent;
    rest /= extent;
    return at;
}

// Reports an index in memory that points outside what it indexes. The launch skips it; the smallest
// number of a launch that reported stays, so that the message names the first.
DEVICE void report(int *status, int launch) { atomicMin(status, launch); }

// --- reductions ----------------------------------------------------------------------------------

// The lanes of the group of `T` threads (a power of two, at most a warp) that the calling thread
// belongs to.
template <int T> DEVICE u32 group_mask() {
    if (T >= 32) return ALL_LANES;
    u32 lane = threadIdx.x % 32;
    return ((1u << (T % 32)) - 1u) << (lane / T * T);
}

struct Sum {
    static DEVICE float identity() { return 0.0f; }
    template <class T> static DEVICE T join(T a, T b) { return a + b; }
};

DEVICE float larger(float a, float b) { return b > a ? b : a; }
DEVICE float unless_zero(float a, float b) { return b != 0.0f ? a : 0.0f; }

// NaN is passed over.
struct Largest {
    static DEVICE float identity() { return -infinity(); }
    template <class T> static DEVICE T join(T a, T b) { return larger(a, b); }
};

// Over groups of `T` adjacent lanes; all lanes of the group call it, and all get the result.
template <class Op, int T> DEVICE float lanes(float x, u32 mask) {
#pragma unroll
    for (int distance = T / 2; distance > 0; distance /= 2) x = Op::join(x, __shfl_xor_sync(mask, x, distance));
    return x;
}

// Over `T` threads: adjacent lanes, or the whole block where `T` is more than a warp, in which case
// `buffer` is shared memory for a float of each warp and every thread of the block calls it.
template <class Op, int T> DEVICE float threads(float x, float *buffer) {
    if (T <= 32) return lanes<Op, (T < 32 ? T : 32)>(x, group_mask<(T < 32 ? T : 32)>());
    x = lanes<Op, 32>(x, ALL_LANES);
    // The buffer may still be read from the reduction before.
    __syncthreads();
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = x;
    __syncthreads();
    x = buffer[0];
#pragma unroll
    for (int warp = 1; warp < T / 32; ++warp) x = Op::join(x, buffer[warp]);
    return x;
}

// The same in two halves with a barrier of the block between them, which several reductions share:
// each has its own `buffer`, to which every warp gives its part, and from which all join them.
template <class Op> DEVICE void leave_part(float x, float *buffer) {
    x = lanes<Op, 32>(x, ALL_LANES);
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = x;
}
template <class Op, int T> DEVICE float join_parts(const float *buffer) {
    float x = buffer[0];
#pragma unroll
    for (int warp = 1; warp < T / 32; ++warp) x = Op::join(x, buffer[warp]);
    return x;
}

// The sum of `count` parts of `length` floats, for a column: a block has 32 columns, which are
// adjacent, its warps take the parts in turns, and the first warp has the result.
template <int THREADS> DEVICE float add_parts(const float *parts, int count, int length, int column) {
    constexpr int WARPS = THREADS / 32;
    __shared__ float sums[WARPS][32];
    int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
    float sum = 0.0f;
    if (column < length) {
#pragma unroll 8
        for (int part = warp; part < count; part += WARPS) sum += parts[i64(part) * length + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    sum = sums[0][lane];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) sum += sums[w][lane];
    return sum;
}

// Waits for the threads that share a row: the lanes of a group, or the block.
template <int T> DEVICE void join_threads() {
    if (T <= 32) __syncwarp(group_mask<(T < 32 ? T : 32)>());
    else __syncthreads();
}

// --- functions -----------------------------------------------------------------------------------

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// 2^x; 0 where that is less than a normal number.
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
DEVICE float silu_grad(float x) {
    float s = sigmoid(x);
    return s * fmaf(x, 1.0f - s, 1.0f);
}
// (1 + tanh u) / 2 = sigmoid(2u), without the cancellation.
DEVICE float gelu(float x) { return x * sigmoid(2.0f * 0.7978846f * x * fmaf(0.044715f * x, x, 1.0f)); }
DEVICE float gelu_grad(float x) {
    float s = sigmoid(2.0f * 0.7978846f * x * fmaf(0.044715f * x, x, 1.0f));
    float inner = 2.0f * 0.7978846f * fmaf(3.0f * 0.044715f * x, x, 1.0f);
    return s * fmaf(x * (1.0f - s), inner, 1.0f);
}
DEVICE float relu(float x) { return x > 0.0f ? x : 0.0f; }
DEVICE float positive(float x) { return x > 0.0f ? 1.0f : 0.0f; }
DEVICE float softplus(float x) { return relu(x) + (x == x ? log1pf(expf(-fabsf(x))) : x); }
DEVICE float square(float x) { return x * x; }
// By its series, after whole turns are taken off.
DEVICE float sine(double x) {
    const double TURN = 6.283185307179586;
    x -= TURN * floor(x / TURN + 0.5);
    double term = x, sum = x;
    for (int n = 1; n < 14; ++n) {
        term *= -x * x / double(2 * n * (2 * n + 1));
        sum += term;
    }
    return float(sum);
}
DEVICE float cosine(double x) { return sine(x + 1.5707963267948966); }

// --- adjacent elements ---------------------------------------------------------------------------

// Words that are read and written in one access, on as many bytes.
template <int N> struct __align__(4 * N) Words {
    u32 of[N];
};

// A function of each of `N` floats; loops, because what is inlined again and again takes long to
// compile.
#define OF_EACH(function)                                             \
    friend DEVICE Floats function(Floats a) {                         \
        _Pragma("unroll") for (float &x : a.x) x = ::function(x);     \
        return a;                                                     \
    }
// The statement for each `i`, without a loop that would have to be unrolled: what is small is
// compiled faster so.
#define FOR_EACH(statement)                                             \
    {                                                                   \
        { constexpr int i = 0; statement; }                             \
        if constexpr (N > 1) { constexpr int i = 1; statement; }        \
        if constexpr (N > 2) { constexpr int i = 2; statement; }        \
        if constexpr (N > 3) { constexpr int i = 3; statement; }        \
        if constexpr (N > 4) { constexpr int i = 4; statement; }        \
        if constexpr (N > 5) { constexpr int i = 5; statement; }        \
        if constexpr (N > 6) { constexpr int i = 6; statement; }        \
        if constexpr (N > 7) { constexpr int i = 7; statement; }        \
    }
#define OF_PAIRS(operation)                                       \
    friend DEVICE Floats operator operation(Floats a, Floats b) { \
        FOR_EACH(a.x[i] = a.x[i] operation b.x[i])                \
        return a;                                                 \
    }

// `N` floats of a thread, adjacent in memory; `N` is 1, 4 or 8. A float stands for as many equal
// ones.
template <int N> struct Floats {
    float x[N];

    Floats() = default;
    DEVICE Floats(float all) {
        FOR_EACH(x[i] = all)
    }
    template <class... Rest> DEVICE Floats(float a, float b, Rest... rest) : x{a, b, rest...} {}

    DEVICE void set(int at, float value) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = i == at ? value : x[i];
    }

    // All of them joined: halves with one another, as `lanes` does.
    template <class Op> DEVICE float all() const {
        Floats y = *this;
#pragma unroll
        for (int distance = N / 2; distance > 0; distance /= 2)
#pragma unroll
            for (int i = 0; i < distance; ++i) y.x[i] = Op::join(y.x[i], y.x[i + distance]);
        return y.x[0];
    }

    OF_PAIRS(+)
    OF_PAIRS(-)
    OF_PAIRS(*)
    OF_PAIRS(/)
    friend DEVICE Floats operator-(Floats a) {
        FOR_EACH(a.x[i] = -a.x[i])
        return a;
    }
    friend DEVICE Floats larger(Floats a, Floats b) {
#pragma unroll
        for (int i = 0; i < N; ++i) a.x[i] = ::larger(a.x[i], b.x[i]);
        return a;
    }
    friend DEVICE Floats unless_zero(Floats a, Floats b) {
#pragma unroll
        for (int i = 0; i < N; ++i) a.x[i] = ::unless_zero(a.x[i], b.x[i]);
        return a;
    }
    friend DEVICE Floats fmaf(Floats a, Floats b, Floats c) {
        FOR_EACH(c.x[i] = ::fmaf(a.x[i], b.x[i], c.x[i]))
        return c;
    }
    OF_EACH(expf)
    OF_EACH(logf)
    OF_EACH(tanhf)
    OF_EACH(sqrtf)
    OF_EACH(sigmoid)
    OF_EACH(silu)
    OF_EACH(silu_grad)
    OF_EACH(gelu)
    OF_EACH(gelu_grad)
    OF_EACH(relu)
    OF_EACH(positive)
    OF_EACH(sine)
    OF_EACH(cosine)
    OF_EACH(floorf)
    OF_EACH(softplus)
    OF_EACH(square)
};

// From and to as many adjacent elements, on 16 bytes or on all that there are; in accesses of 16
// bytes at most.
template <int N> DEVICE Floats<N> load(const float *from) {
    Floats<N> y;
    if constexpr (N == 1) y.x[0] = *from;
    else {
        Words<4> words[N / 4];
        words[0] = reinterpret_cast<const Words<4> *>(from)[0];
        if constexpr (N > 4) words[1] = reinterpret_cast<const Words<4> *>(from)[1];
        FOR_EACH(y.x[i] = __uint_as_float(words[i / 4].of[i % 4]))
    }
    return y;
}

template <int N> DEVICE Floats<N> load(const bf16 *from) {
    if constexpr (N == 1) return to_float(*from);
    else {
        Words<N / 2> words = *reinterpret_cast<const Words<N / 2> *>(from);
        Floats<N> y;
        FOR_EACH(y.x[i] = __uint_as_float(i % 2 == 0 ? words.of[i / 2] << 16 : words.of[i / 2] & 0xffff0000u))
        return y;
    }
}

template <int N> DEVICE void store(float *to, Floats<N> from) {
    if constexpr (N == 1) *to = from.x[0];
    else {
        Words<4> words[N / 4];
        FOR_EACH(words[i / 4].of[i % 4] = __float_as_uint(from.x[i]))
        reinterpret_cast<Words<4> *>(to)[0] = words[0];
        if constexpr (N > 4) reinterpret_cast<Words<4> *>(to)[1] = words[1];
    }
}

template <int N> DEVICE void store(bf16 *to, Floats<N> from) {
    if constexpr (N == 1) store(*to, from.x[0]);
    else {
        Words<N / 2> words;
        FOR_EACH(if (i % 2 == 0) words.of[i / 2] = pack(from.x[i], from.x[i | 1]))
        *reinterpret_cast<Words<N / 2> *>(to) = words;
    }
}

// Sine and cosine of an angle that may be large: reduced in f64, evaluated in f32.
DEVICE void sine_cosine(double angle, float &sine, float &cosine) {
    constexpr double ROUND = 6755399441055744.0;
    double t = fma(angle, 0.63661977236758134, ROUND), n = t - ROUND;
    double wide = fma(n, -1.5707963267948966, angle);
    float r = float(fma(n, -6.123233995736766e-17, wide)), z = r * r;
    float s = fmaf(-1.9515296e-4f, z, 8.332161e-3f);
    s = fmaf(fmaf(s, z, -1.6666655e-1f) * z, r, r);
    float c = fmaf(2.4433157e-5f, z, -1.3887316e-3f);
    c = fmaf(fmaf(c, z, 4.1666646e-2f) * z, z, fmaf(z, -0.5f, 1.0f));
    u32 quadrant = u32(__double2loint(t));
    sine = quadrant & 1 ? c : s;
    cosine = quadrant & 1 ? s : c;
    sine = quadrant & 2 ? -sine : sine;
    cosine = (quadrant + 1) & 2 ? -cosine : cosine;
}
