// The words of a dialect that naive kernels are written in: types, one thread's number, bits of
// floats, and how an index out of range is reported. Another GPU language needs this file again and
// nothing else; the kernels (`compiler/src/op/NAME/naive.cuh`) use no assembly, no shared memory
// and nothing of warps.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define DEVICE __device__ __forceinline__

DEVICE i64 thread_number() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
// Rounded each for itself, never joined.
DEVICE float product_of(float a, float b) { return __fmul_rn(a, b); }
DEVICE float difference_of(float a, float b) { return __fsub_rn(a, b); }
DEVICE void report(int *status, int launch) { atomicMin(status, launch); }

// --- from here on the same in every dialect ------------------------------------------------------

struct bf16 {
    u16 bits;
};

DEVICE float infinity() { return float_of(0x7f800000u); }
DEVICE float value(float x) { return x; }
DEVICE float value(bf16 x) { return float_of((u32)x.bits << 16); }
// Number `at` of a weight, in whatever it is stored (`blocks.cuh` has the packed ones).
DEVICE float number(const float *from, i64 at) { return from[at]; }
DEVICE float number(const bf16 *from, i64 at) { return value(from[at]); }

DEVICE void put(float *to, float x) { *to = x; }
// To the nearest, ties to even; NaN stays NaN.
DEVICE void put(bf16 *to, float x) {
    u32 bits = bits_of(x);
    to->bits = x == x ? (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16) : (u16)0x7fff;
}

// A row of no token: -0, and -1 of integers.
DEVICE void absent(float *to) { *to = float_of(0x80000000u); }
DEVICE void absent(bf16 *to) { to->bits = 0x8000; }
DEVICE void absent(int *to) { *to = -1; }

// Whether an index from memory is below a bound; reports where not.
DEVICE bool below(i64 index, i64 bound, int *status, int launch) {
    bool fine = index >= 0 && index < bound;
    if (!fine) report(status, launch);
    return fine;
}

// NaN is never worth choosing.
DEVICE float worth(float x) { return x == x ? x : -infinity(); }
// Whether number `i` comes before number `j` where the largest come first.
DEVICE bool before(float x, i64 i, float y, i64 j) { return worth(x) > worth(y) || (worth(x) == worth(y) && i < j); }

// --- functions of row kernels --------------------------------------------------------------------

// The widest float of the dialect.
typedef double Wide;

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float silu(float x) { return x * sigmoid(x); }
DEVICE float silu_grad(float x) { return sigmoid(x) * (1.0f + x * (1.0f - sigmoid(x))); }
DEVICE float gelu_inner(float x) { return 0.7978846f * (x + 0.044715f * x * x * x); }
DEVICE float gelu(float x) { return 0.5f * x * (1.0f + tanhf(gelu_inner(x))); }
DEVICE float gelu_grad(float x) {
    float t = tanhf(gelu_inner(x)), slope = 0.7978846f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope;
}
DEVICE float square(float x) { return x * x; }
DEVICE float relu(float x) { return x > 0.0f ? x : 0.0f; }
DEVICE float softplus(float x) { return x > 20.0f ? x : logf(1.0f + expf(x)); }
DEVICE float positive(float x) { return x > 0.0f ? 1.0f : 0.0f; }
DEVICE float larger(float a, float b) { return b > a ? b : a; }
DEVICE float kept(float a, float b) { return b != 0.0f ? a : 0.0f; }

// By its series, after whole turns are taken off.
DEVICE float sine(Wide x) {
    const Wide TURN = 6.283185307179586;
    x -= TURN * floor(x / TURN + 0.5);
    Wide term = x, sum = x;
    for (int n = 1; n < 14; ++n) {
        term *= -x * x / (Wide)(2 * n * (2 * n + 1));
        sum += term;
    }
    return (float)sum;
}
DEVICE float cosine(Wide x) { return sine(x + 1.5707963267948966); }

#define TABLE static __device__ const
