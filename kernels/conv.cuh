// Causal convolutions over the sequence, a filter of its own for each channel: little arithmetic
// for each number, so what counts is that neighbouring threads read neighbouring channels. Rows
// that several tokens need come from the cache.
#pragma once
#include "prelude.cuh"

// The token before or after one that takes part; -1 where its document ends.
template <int TOKENS> DEVICE int following(const int *segments, int token, bool later) {
    int step = later ? 1 : -1;
    for (int i = token + step; i >= 0 && i < TOKENS; i += step) {
        if (segments[i] >= 0) return segments[i] == segments[token] ? i : -1;
    }
    return -1;
}

// A thread has `N` adjacent channels of a token, which are read and written at once.
template <int BATCH, int TOKENS, int CHANNELS, int WIDTH, bool LATER, int N>
DEVICE void conv_rows(const float *x, i64 x_stride, const float *w, float *y) {
    i64 at = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (at >= i64(BATCH) * TOKENS * CHANNELS) return;
    int c = int(at % CHANNELS), i = int(at / CHANNELS % TOKENS);
    const float *own = x + at / CHANNELS * x_stride + c;
    int count = LATER ? TOKENS - i : i + 1;
    if (count > WIDTH) count = WIDTH;
    i64 step = LATER ? x_stride : -x_stride;
    Floats<N> sum(0.0f);
    for (int k = 0; k < count; ++k) sum = fmaf(load<N>(w + i64(k) * CHANNELS + c), load<N>(own + k * step), sum);
    store(y + at, sum);
}

template <int BATCH, int TOKENS, int CHANNELS, int WIDTH, bool LATER, int N>
DEVICE void conv_documents(const float *x, i64 x_stride, const float *w, const int *segments, float *y) {
    i64 at = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (at >= i64(BATCH) * TOKENS * CHANNELS) return;
    int c = int(at % CHANNELS), i = int(at / CHANNELS % TOKENS);
    i64 first = at / (i64(CHANNELS) * TOKENS) * TOKENS;
    const int *own = segments + first;
    Floats<N> sum(0.0f);
    int j = own[i] >= 0 ? i : -1;
    for (int k = 0; k < WIDTH && j >= 0; ++k) {
        sum = fmaf(load<N>(w + i64(k) * CHANNELS + c), load<N>(x + (first + j) * x_stride + c), sum);
        if (k + 1 < WIDTH) j = following<TOKENS>(own, j, LATER);
    }
    store(y + at, sum);
}

// A thread has a channel of a text.
template <int BATCH, int TOKENS, int CHANNELS, int WIDTH>
DEVICE void conv_continue(const float *x, i64 x_stride, const float *w, const int *slots, float *y, float *history) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= i64(BATCH) * CHANNELS) return;
    int c = int(at % CHANNELS);
    i64 b = at / CHANNELS;
    float *rows = history + b * (WIDTH - 1) * CHANNELS + c;
    for (int i = 0; i < TOKENS; ++i) {
        i64 token = b * TOKENS + i;
        float next = x[token * x_stride + c], sum = 0.0f;
        if (slots[token] >= 0) {
            for (int k = 0; k + 1 < WIDTH; ++k) {
                float row = rows[i64(k) * CHANNELS];
                sum = fmaf(w[i64(WIDTH - 1 - k) * CHANNELS + c], row, sum);
                if (k > 0) rows[i64(k - 1) * CHANNELS] = row;
            }
            if (WIDTH > 1) rows[i64(WIDTH - 2) * CHANNELS] = next;
            sum = fmaf(w[c], next, sum);
        }
        y[token * CHANNELS + c] = sum;
    }
}

// The sum of what eight groups of threads found of 32 channels, in the order of the groups.
template <int CHANNELS> DEVICE void conv_sum(float sum, float *dw, int entry, int c) {
    __shared__ float parts[8][32];
    int lane = int(threadIdx.x % 32), group = int(threadIdx.x / 32);
    // The sums of the entry before may still be read.
    __syncthreads();
    parts[group][lane] = sum;
    __syncthreads();
    if (group > 0 || c >= CHANNELS) return;
    float all = 0.0f;
    for (int g = 0; g < 8; ++g) all += parts[g][lane];
    dw[i64(entry) * CHANNELS + c] = all;
}

// A block has `ENTRIES` of the filters of 32 channels, which divide `WIDTH`, and `SLICE` tokens:
// sums of slices are `CHANNELS` times `WIDTH` apart.
template <int CHANNELS, int WIDTH, int ENTRIES, int SLICE> struct Filter {
    int entry, c;
    i64 slice;
    DEVICE Filter() {
        u32 block = blockIdx.x;
        entry = int(take(block, WIDTH / ENTRIES)) * ENTRIES;
        c = int(take(block, (CHANNELS + 31) / 32)) * 32 + int(threadIdx.x % 32);
        slice = block;
    }
    // `add(token, sums)` of the tokens of this thread.
    template <class Add> DEVICE void sum(i64 tokens, float *dw, Add add) const {
        i64 end = (slice + 1) * SLICE < tokens ? (slice + 1) * SLICE : tokens;
        float sums[ENTRIES];
#pragma unroll
        for (int e = 0; e < ENTRIES; ++e) sums[e] = 0.0f;
        if (c < CHANNELS) {
#pragma unroll 4
            for (i64 token = slice * SLICE + threadIdx.x / 32; token < end; token += 8) add(token, sums);
        }
#pragma unroll
        for (int e = 0; e < ENTRIES; ++e) conv_sum<CHANNELS>(sums[e], dw + slice * WIDTH * CHANNELS, entry + e, c);
    }
};

template <int BATCH, int TOKENS, int CHANNELS, int WIDTH, int ENTRIES, int SLICE>
DEVICE void conv_filters(const float *x, i64 x_stride, const float *dy, i64 dy_stride, float *dw) {
    Filter<CHANNELS, WIDTH, ENTRIES, SLICE> at;
    at.sum(i64(BATCH) * TOKENS, dw, [&](i64 token, float (&sums)[ENTRIES]) {
        float d = dy[token * dy_stride + at.c];
        int before = int(token % TOKENS) - at.entry;
#pragma unroll
        for (int e = 0; e < ENTRIES; ++e)
            if (before >= e) sums[e] = fmaf(d, x[(token - at.entry - e) * x_stride + at.c], sums[e]);
    });
}

template <int BATCH, int TOKENS, int CHANNELS, int WIDTH, int ENTRIES, int SLICE>
DEVICE void conv_filters_of_documents(const float *x, i64 x_stride, const float *dy, i64 dy_stride, const int *segments,
                                      float *dw) {
    Filter<CHANNELS, WIDTH, ENTRIES, SLICE> at;
    at.sum(i64(BATCH) * TOKENS, dw, [&](i64 token, float (&sums)[ENTRIES]) {
        i64 first = token / TOKENS * TOKENS;
        const int *own = segments + first;
        int j = own[token - first] >= 0 ? int(token - first) : -1;
        for (int k = 0; k < at.entry && j >= 0; ++k) j = following<TOKENS>(own, j, false);
        float d = dy[token * dy_stride + at.c];
#pragma unroll
        for (int e = 0; e < ENTRIES; ++e) {
            if (j >= 0) sums[e] = fmaf(d, x[(first + j) * x_stride + at.c], sums[e]);
            if (e + 1 < ENTRIES && j >= 0) j = following<TOKENS>(own, j, false);
        }
    });
}

// The sums of all slices, in their order.
template <int COUNT> DEVICE void conv_slices(const float *parts, float *dw, int slices) {
    int at = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= COUNT) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int slice = 0; slice < slices; ++slice) sum += parts[i64(slice) * COUNT + at];
    dw[at] = sum;
}
