// Moving rows: gathers and their gradients, caches, embeddings, zeroing and copying. A thread has
// an element, or several that are adjacent, and adjacent threads have adjacent elements. Elements
// that are only moved are words of any size, `WIDTH` to a row; elements of a computation are read
// `N` at a time, where `N` divides `WIDTH`.
#pragma once
#include "prelude.cuh"

DEVICE i64 thread_number() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }

// Whether an index from memory is below a bound; reports where not.
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
template <int ROWS, int K, int WIDTH, bool GATED, int N, class E>
DEVICE void combine(const E *y, const int *inverse, const float *gates, E *x, int *status, int launch) {
    i64 at = thread_number() * N, row = at / WIDTH;
    if (row >= ROWS) return;
    Floats<N> sum = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        int place = inverse[row * K + k];
        if (!below(place, i64(ROWS) * K, status, launch)) return;
        Floats<N> value = load<N>(y + i64(place) * WIDTH + at % WIDTH);
        sum = fmaf(GATED ? gates[row * K + k] : 1.0f, value, sum);
    }
    store(x + at, sum);
}

// `y[s] = gates[order[s]] · d[order[s] / K]`
template <int SLOTS, int K, int WIDTH, int N, class E>
DEVICE void combine_grad(const E *d, const int *order, const float *gates, E *y, int *status, int launch) {
    i64 at = thread_number() * N, s = at / WIDTH;
    if (s >= SLOTS) return;
    int slot = order[s];
    if (below(slot, SLOTS, status, launch)) store(y + at, gates[slot] * load<N>(d + i64(slot / K) * WIDTH + at % WIDTH));
}

// `gates[row, k] = d[row] · y[inverse[row, k]]`; a warp has a gate.
template <int ROWS, int K, int WIDTH, int N, class E>
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
    Floats<N> products = 0.0f;
#pragma unroll 2
    for (int i = lane * N; i < WIDTH; i += 32 * N) products = fmaf(load<N>(a + i), load<N>(b + i), products);
    float sum = lanes<Sum, 32>(products.template all<Sum>(), ALL_LANES);
    if (lane == 0) gates[gate] = sum;
}

// Row `row` of the cache becomes `x`, which is stored in pieces.
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

template <int ROWS, int VOCAB, int WIDTH, class Word>
DEVICE void embed(const Word *table, const int *ids, Word *x, int *status, int launch) {
    i64 at = thread_number(), row = at / WIDTH;
    if (row >= ROWS) return;
    int id = ids[row];
    if (below(id, VOCAB, status, launch)) x[at] = table[i64(id) * WIDTH + at % WIDTH];
}

// `N` words at a time, of 16 bytes together where there are several, and one at a time where fewer
// are left.
template <class Word, i64 COUNT, int N = 1> DEVICE void zero(Word *x) {
    i64 at = thread_number() * N;
    if (N > 1 && at + N <= COUNT) *reinterpret_cast<Words<4> *>(x + at) = Words<4>();
    else
        for (int i = 0; i < N && at + i < COUNT; ++i) x[at + i] = 0;
}

template <class Word, i64 COUNT, int N> DEVICE void copy(const Word *x, Word *y) {
    i64 at = thread_number() * N;
    if (N > 1 && at + N <= COUNT) *reinterpret_cast<Words<4> *>(y + at) = *reinterpret_cast<const Words<4> *>(x + at);
    else
        for (int i = 0; i < N && at + i < COUNT; ++i) y[at + i] = x[at + i];
}

template <i64 COUNT, int N> DEVICE void add(const float *x, float *y) {
    i64 at = thread_number() * N;
    if (at + N <= COUNT) store(y + at, load<N>(y + at) + load<N>(x + at));
    else
        for (; at < COUNT; ++at) y[at] += x[at];
}
