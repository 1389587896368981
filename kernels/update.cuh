// The optimizer step.
#pragma once
#include "prelude.cuh"

DEVICE double add_lanes(double x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

// The sum over a block, in every thread; `buffer` has a double for each warp.
template <int THREADS> DEVICE double add_threads(double x, double *buffer) {
    x = add_lanes(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = x;
    __syncthreads();
    x = buffer[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) x += buffer[warp];
    return x;
}

// Squares are summed in f32 a few at a time, then in f64: `parts[block]`.
template <i64 COUNT, int THREADS, int EACH> DEVICE void norm_parts(const float *g, double *parts) {
    __shared__ double buffer[THREADS / 32];
    i64 first = i64(blockIdx.x) * THREADS * EACH;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < EACH; ++i) {
        i64 at = first + i * THREADS + threadIdx.x;
        if (at < COUNT) sum = fmaf(g[at], g[at], sum);
    }
    double total = add_threads<THREADS>(double(sum), buffer);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

template <int PARTS, int THREADS> DEVICE void norm_join(const double *parts, float *norm) {
    __shared__ double buffer[THREADS / 32];
    double sum = 0.0;
    for (int i = threadIdx.x; i < PARTS; i += THREADS) sum += parts[i];
    sum = add_threads<THREADS>(sum, buffer);
    if (threadIdx.x == 0) *norm = float(sqrt(sum));
}

// `scalars`: learning rate, `1 / (1 - β1^t)`, `1 / (1 - β2^t)`, clip.
template <i64 COUNT>
DEVICE void adamw(float *w, float *g, float *m, float *v, const float *norm, const float *scalars, float b1, float c1,
                  float b2, float c2, float eps, float decay, float factor) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= COUNT) return;
    // An infinite clip, and a norm of 0, give infinity or NaN here, and 1 in the end.
    float limit = scalars[3], clip = limit / *norm;
    clip = limit == infinity() || !(clip < 1.0f) ? 1.0f : clip;
    float rate = scalars[0] * factor, kept = 1.0f - rate * decay;
    float x = g[at] * clip;
    float mean = b1 * m[at] + c1 * x, variance = b2 * v[at] + c2 * (x * x);
    float step = mean * scalars[1] / (sqrtf(variance * scalars[2]) + eps);
    m[at] = mean;
    v[at] = variance;
    w[at] = w[at] * kept - rate * step;
    g[at] = 0.0f;
}

// `bias += rate · law(target - count)`; one block. The median is found by rank.
template <int EXPERTS, bool MEDIAN, bool PROPORTIONAL, int THREADS>
DEVICE void balance(float *bias, float *counts, double rate) {
    __shared__ double buffer[THREADS / 32];
    __shared__ float middle[2];
    double sum = 0.0;
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) sum += double(counts[e]);
    double mean = add_threads<THREADS>(sum, buffer) / EXPERTS, target = mean;
    if (MEDIAN) {
        for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
            int rank = 0;
            for (int i = 0; i < EXPERTS; ++i) rank += counts[i] < counts[e] || (counts[i] == counts[e] && i < e);
            if (rank == (EXPERTS - 1) / 2) middle[0] = counts[e];
            if (rank == EXPERTS / 2) middle[1] = counts[e];
        }
        __syncthreads();
        target = (double(middle[0]) + double(middle[1])) / 2.0;
    }
    // Nobody writes a count before everybody has read them.
    __syncthreads();
    for (int e = threadIdx.x; e < EXPERTS; e += THREADS) {
        double difference = target - double(counts[e]), step;
        if (PROPORTIONAL) step = mean == 0.0 ? 0.0 : difference / mean;
        else step = difference > 0.0 ? 1.0 : difference < 0.0 ? -1.0 : 0.0;
        bias[e] = float(double(bias[e]) + rate * step);
        counts[e] = 0.0f;
    }
}
