// The words of kernel statements in CUDA and in HIP: types, one thread's number, bits of floats,
// and how an index out of range is reported (`compiler/src/statement`). `words.metal` has the same.
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

// The widest float of the dialect.
typedef double Wide;

struct bf16 {
    u16 bits;
};

DEVICE float value(bf16 x) { return float_of((u32)x.bits << 16); }
// To the nearest, ties to even; NaN stays NaN.
DEVICE void put(bf16 *to, float x) {
    u32 bits = bits_of(x);
    to->bits = x == x ? (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16) : (u16)0x7fff;
}
DEVICE void absent(bf16 *to) { to->bits = 0x8000; }

#define TABLE static __device__ const
