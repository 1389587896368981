// The words of row kernels as statements (`compiler/src/statement`, `ROW_WORDS`): a thread's place
// in its block, barriers, numbers joined over threads, and adjacent floats. Functions of single
// floats are those of `prelude.cuh`.
#pragma once
#include "prelude.cuh"

typedef double Wide;
#define TABLE static __device__ const

DEVICE float value(float x) { return x; }
DEVICE float value(bf16 x) { return to_float(x); }
DEVICE void put(float *to, float x) { store(*to, x); }
DEVICE void put(bf16 *to, float x) { store(*to, x); }

typedef Floats<4> floats4;
typedef Floats<8> floats8;

template <class T> DEVICE floats4 load4(const T *from) { return load<4>(from); }
template <class T> DEVICE floats8 load8(const T *from) { return load<8>(from); }
template <class T, int N> DEVICE void put(T *to, Floats<N> x) { store(to, x); }
template <int N> DEVICE Floats<N> with_lane(Floats<N> x, int at, float value) {
    x.set(at, value);
    return x;
}
template <int N> DEVICE float all_sum(Floats<N> x) { return x.template all<Sum>(); }
template <int N> DEVICE float all_largest(Floats<N> x) { return x.template all<Largest>(); }

struct Angle {
    float sine, cosine;
};
DEVICE Angle sine_cosine(Wide angle) {
    Angle y;
    sine_cosine(angle, y.sine, y.cosine);
    return y;
}

DEVICE int thread() { return int(threadIdx.x); }
DEVICE int block() { return int(blockIdx.x); }
DEVICE void wait_block() { __syncthreads(); }
// Of the threads that share a row.
template <int THREADS> DEVICE void wait_row() { join_threads<THREADS>(); }
template <int LANES, int ROW> DEVICE float lanes_sum(float x) { return lanes<Sum, LANES>(x, group_mask<ROW>()); }
template <int LANES, int ROW> DEVICE float lanes_largest(float x) { return lanes<Largest, LANES>(x, group_mask<ROW>()); }
DEVICE void leave_sum(float x, float *buffer) { leave_part<Sum>(x, buffer); }
DEVICE void leave_largest(float x, float *buffer) { leave_part<Largest>(x, buffer); }
template <int THREADS> DEVICE float join_sums(const float *buffer) { return join_parts<Sum, THREADS>(buffer); }
template <int THREADS> DEVICE float join_largest(const float *buffer) { return join_parts<Largest, THREADS>(buffer); }
template <int COUNT, int LENGTH> DEVICE float add_parts(const float *parts, int column) {
    return add_parts<256>(parts, COUNT, LENGTH, column);
}
