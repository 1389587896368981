// Sums over the tokens so far. A thread has a channel of a sequence and adds in the order of the
// tokens, so that documents, states and a device without threads give the same bits.
#pragma once
#include "prelude.cuh"

template <int BATCH, int TOKENS, int CHANNELS, bool LATER>
DEVICE void running_rows(const float *x, i64 x_stride, float *y) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= i64(BATCH) * CHANNELS) return;
    i64 first = at / CHANNELS * TOKENS, c = at % CHANNELS;
    float sum = 0.0f;
#pragma unroll 4
    for (int n = 0; n < TOKENS; ++n) {
        i64 token = first + (LATER ? TOKENS - 1 - n : n);
        sum += x[token * x_stride + c];
        y[token * CHANNELS + c] = sum;
    }
}

template <int BATCH, int TOKENS, int CHANNELS, bool LATER>
DEVICE void running_documents(const float *x, i64 x_stride, const int *segments, float *y) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= i64(BATCH) * CHANNELS) return;
    i64 first = at / CHANNELS * TOKENS, c = at % CHANNELS;
    int last = -1;
    float sum = 0.0f;
    for (int n = 0; n < TOKENS; ++n) {
        i64 token = first + (LATER ? TOKENS - 1 - n : n);
        int segment = segments[token];
        if (segment < 0) {
            y[token * CHANNELS + c] = 0.0f;
            continue;
        }
        if (segment != last) sum = 0.0f;
        last = segment;
        sum += x[token * x_stride + c];
        y[token * CHANNELS + c] = sum;
    }
}

template <int BATCH, int TOKENS, int CHANNELS, bool>
DEVICE void running_continue(const float *x, i64 x_stride, const int *slots, float *y, float *state) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= i64(BATCH) * CHANNELS) return;
    i64 first = at / CHANNELS * TOKENS, c = at % CHANNELS;
    float sum = state[at];
    for (i64 token = first; token < first + TOKENS; ++token) {
        if (slots[token] < 0) {
            y[token * CHANNELS + c] = 0.0f;
            continue;
        }
        sum += x[token * x_stride + c];
        y[token * CHANNELS + c] = sum;
    }
    state[at] = sum;
}
