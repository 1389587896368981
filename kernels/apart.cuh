// How far two contents of memory are apart: what proofs of kernels ask on the device, so that
// nothing of a large buffer comes to the host. A block has four words of its own, which the host
// folds; all four are orders of integers, so no order of threads matters.
#pragma once
#include "prelude.cuh"

// The bits of what is not negative, in the order of the numbers.
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }

DEVICE float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

DEVICE bool finite(float x) { return magnitude(x) < infinity(); }

// Words of a block: the largest finite number of `a`; the largest finite `|a - b|`; whether a pair
// differs that has no finite difference; whether any bits differ.
template <int THREADS, class E>
DEVICE void apart(const E *a, const E *b, u32 *words, i64 elements) {
    __shared__ u32 most[THREADS][4];
    u32 own[4] = {0, 0, 0, 0};
    i64 step = i64(gridDim.x) * THREADS;
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < elements; i += step) {
        E one = a[i], other = b[i];
        float x = to_float(one), y = to_float(other), difference = magnitude(difference_of(x, y));
        bool same = x == y || (x != x && y != y);
        if (finite(x)) own[0] = max(own[0], bits_of(magnitude(x)));
        if (!same && finite(difference)) own[1] = max(own[1], bits_of(difference));
        if (!same && !finite(difference)) own[2] = 1;
        if (bits_of(x) != bits_of(y)) own[3] = 1;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) most[threadIdx.x][k] = own[k];
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (int(threadIdx.x) < half) {
#pragma unroll
            for (int k = 0; k < 4; ++k) most[threadIdx.x][k] = max(most[threadIdx.x][k], most[threadIdx.x + half][k]);
        }
    }
    __syncthreads();
    if (threadIdx.x < 4) words[i64(blockIdx.x) * 4 + threadIdx.x] = most[0][threadIdx.x];
}
