// Moving rows: gathers and their gradients, caches, embeddings, zeroing and copying. A thread has an element; adjacent
// threads have adjacent elements.
#pragma once
#include "prelude.cuh"

DEVICE i64 thread_number() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }

// Whether an index from memory lies below a bound; tells where not.
DEVICE bool below(int index, i64 bound, int *status, int launch) {
    bool fine = index >= 0 && i64(index) < bound;
    if (!fine) report(status, launch);
    return fine;
}

template <int SLOTS, int K, int WIDTH, class E>
DEVICE void gather(const E *x, const int *order, E *y, int *status, int launch) {
    i64 at = thread_number(), slot = at / WIDTH;
    if (slot >= SLOTS) return;
    int source = order[slot];
    if (below(source, SLOTS, status, launch)) y[at] = x[i64(source / K) * WIDTH + at % WIDTH];
}

// `x[row] = Σ_k gates · y[inverse]`
template <int ROWS, int K, int WIDTH, bool GATED, class E>
DEVICE void combine(const E *y, const int *inverse, const float *gates, E *x, int *status, int launch) {
    i64 at = thread_number(), row = at / WIDTH;
    if (row >= ROWS) return;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        int place = inverse[row * K + k];
        if (!below(place, i64(ROWS) * K, status, launch)) return;
        float value = to_float(y[i64(place) * WIDTH + at % WIDTH]);
        sum = fmaf(GATED ? gates[row * K + k] : 1.0f, value, sum);
    }
    store(x[at], sum);
}

// `y[s] = gates[order[s]] · d[order[s] / K]`
template <int SLOTS, int K, int WIDTH, class E>
DEVICE void combine_grad(const E *d, const int *order, const float *gates, E *y, int *status, int launch) {
    i64 at = thread_number(), s = at / WIDTH;
    if (s >= SLOTS) return;
    int slot = order[s];
    if (below(slot, SLOTS, status, launch)) store(y[at], gates[slot] * to_float(d[i64(slot / K) * WIDTH + at % WIDTH]));
}

// `gates[row, k] = d[row] · y[inverse[row, k]]`; a warp has a gate.
template <int ROWS, int K, int WIDTH, class E>
DEVICE void combine_gates(const E *d, const E *y, const int *inverse, float *gates, int *status, int launch) {
    i64 gate = thread_number() / 32;
    if (gate >= i64(ROWS) * K) return;
    int lane = int(threadIdx.x % 32), place = inverse[gate];
    bool fine = place >= 0 && i64(place) < i64(ROWS) * K;
    if (!fine) {
        if (lane == 0) report(status, launch);
        return;
    }
    const E *a = d + gate / K * WIDTH, *b = y + i64(place) * WIDTH;
    float sum = 0.0f;
    for (int i = lane; i < WIDTH; i += 32) sum = fmaf(to_float(a[i]), to_float(b[i]), sum);
    sum = lanes<Sum, 32>(sum, ALL_LANES);
    if (lane == 0) gates[gate] = sum;
}

// Row `row` of the cache becomes `x`, which lies in pieces.
template <int LENGTH, int PARTS> DEVICE void cache_write(const float *x, i64 stride, int row, float *cache) {
    i64 at = thread_number();
    if (at < i64(LENGTH) * PARTS) cache[i64(row) * LENGTH * PARTS + at] = x[at / LENGTH * stride + at % LENGTH];
}

// `x` becomes the row, the row zero.
template <int LENGTH, int PARTS> DEVICE void cache_take(int row, float *cache, float *x, i64 stride) {
    i64 at = thread_number();
    if (at >= i64(LENGTH) * PARTS) return;
    float *from = cache + i64(row) * LENGTH * PARTS + at;
    x[at / LENGTH * stride + at % LENGTH] = *from;
    *from = 0.0f;
}

// Row `i` goes to place `slots[i]` of its sequence, unless that is negative.
template <int ROWS, int TOKENS, int PLACES, int WIDTH, class E>
DEVICE void append(const E *x, i64 stride, const int *slots, E *cache, int *status, int launch) {
    i64 at = thread_number(), row = at / WIDTH;
    if (row >= ROWS) return;
    int place = slots[row];
    if (place < 0 || !below(place, PLACES, status, launch)) return;
    cache[(row / TOKENS * PLACES + place) * WIDTH + at % WIDTH] = x[row * stride + at % WIDTH];
}

template <int ROWS, int VOCAB, int WIDTH>
DEVICE void embed(const float *table, const int *ids, float *x, int *status, int launch) {
    i64 at = thread_number(), row = at / WIDTH;
    if (row >= ROWS) return;
    int id = ids[row];
    if (below(id, VOCAB, status, launch)) x[at] = table[i64(id) * WIDTH + at % WIDTH];
}

// The gradient of `embed`. A block has a row; only the first row of an id goes on, and adds all rows of that id in order:
// no atomics, so the same bits every time. Ids are read 256 at a time.
template <int ROWS, int VOCAB, int WIDTH, bool ADD, int THREADS>
DEVICE void embed_grad(const float *d, const int *ids, float *table, int *status, int launch) {
    constexpr int EACH = (WIDTH + THREADS - 1) / THREADS, WARPS = THREADS / 32;
    __shared__ u32 hits[WARPS];
    int row = int(blockIdx.x), thread = int(threadIdx.x), id = ids[row];
    if (id < 0 || id >= VOCAB) {
        if (thread == 0) report(status, launch);
        return;
    }
    int earlier = 0;
    for (int i = thread; i < row; i += THREADS) earlier |= ids[i] == id;
    if (__syncthreads_or(earlier)) return;
    float sums[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int element = thread + i * THREADS;
        sums[i] = ADD && element < WIDTH ? table[i64(id) * WIDTH + element] : 0.0f;
    }
    for (int first = row; first < ROWS; first += THREADS) {
        bool hit = first + thread < ROWS && ids[first + thread] == id;
        u32 ballot = __ballot_sync(ALL_LANES, hit);
        if (thread % 32 == 0) hits[thread / 32] = ballot;
        __syncthreads();
        for (int warp = 0; warp < WARPS; ++warp) {
            for (u32 left = hits[warp]; left != 0; left &= left - 1) {
                const float *from = d + i64(first + warp * 32 + __ffs(left) - 1) * WIDTH;
#pragma unroll
                for (int i = 0; i < EACH; ++i)
                    if (thread + i * THREADS < WIDTH) sums[i] += from[thread + i * THREADS];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (thread + i * THREADS < WIDTH) table[i64(id) * WIDTH + thread + i * THREADS] = sums[i];
}

template <class Word, i64 COUNT> DEVICE void zero(Word *x) {
    i64 at = thread_number();
    if (at < COUNT) x[at] = 0;
}

template <class Word, i64 COUNT> DEVICE void copy(const Word *x, Word *y) {
    i64 at = thread_number();
    if (at < COUNT) y[at] = x[at];
}

template <i64 COUNT> DEVICE void add(const float *x, float *y) {
    i64 at = thread_number();
    if (at < COUNT) y[at] += x[at];
}
