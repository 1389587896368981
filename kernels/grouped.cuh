// Products of groups of rows with a matrix each, as mixtures of experts need them.
//
// `offsets` says where each group's rows begin. The grid is as large as the worst case needs; which group a block works
// for follows from the offsets: tiles of group `e` begin at `offsets[e] / ROWS + e`, which grows with `e`, leaves every
// group as many as it needs, and is found by bisection without a list.
#pragma once
#include "product.cuh"

// A group's offset, kept inside the rows whatever the memory holds.
DEVICE int offset_of(const int *offsets, int e, int slots) {
    int offset = offsets[e];
    return offset < 0 ? 0 : offset > slots ? slots : offset;
}

// Whether offsets begin at 0 and never fall; looked at by the first block.
template <int SLOTS, int EXPERTS> DEVICE void check_offsets(const int *offsets, int *status, int launch) {
    if (blockIdx.x > 0) return;
    for (int e = threadIdx.x; e <= EXPERTS; e += blockDim.x) {
        int before = e == 0 ? 0 : offsets[e - 1], offset = offsets[e];
        if (offset < before || offset > SLOTS || (e == 0 && offset != 0)) report(status, launch);
    }
}

// The row of `x` for a slot: itself, or `order[slot] / per`.
template <int SLOTS, bool GATHER, int PER>
DEVICE int source_row(const int *order, int slot, int *status, int launch) {
    if (!GATHER) return slot;
    int source = order[slot];
    if (u32(source) >= u32(SLOTS)) {
        report(status, launch);
        return 0;
    }
    return source / PER;
}

// `y[s, n] = Σ_k x[s, k] · w[e, n, k]`, or `w[e, k, n]` where `TRANSPOSED`; rows in no group are zeroed.
template <class T, int SLOTS, int EXPERTS, int OUT, int INNER, bool TRANSPOSED, bool GATHER, int PER, class E, class C>
DEVICE void grouped(const E *x, const E *w, const int *offsets, const int *order, C *y, int *status, int launch) {
    constexpr int N = TRANSPOSED ? INNER : OUT, K = TRANSPOSED ? OUT : INNER;
    __shared__ typename T::Shared shared;
    __shared__ int sources[T::ROWS];
    check_offsets<SLOTS, EXPERTS>(offsets, status, launch);
    u32 block = blockIdx.x;
    int column = int(take(block, (N + T::COLUMNS - 1) / T::COLUMNS)) * T::COLUMNS, tile = int(block);
    int columns = least(T::COLUMNS, N - column);
    // The last group whose tiles begin at or before this one; rows in no group are one more.
    int low = 0, high = EXPERTS;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (offset_of(offsets, middle, SLOTS) / T::ROWS + middle <= tile) low = middle;
        else high = middle - 1;
    }
    int expert = low, first = offset_of(offsets, expert, SLOTS);
    int end = expert < EXPERTS ? offset_of(offsets, expert + 1, SLOTS) : SLOTS;
    int row = first + (tile - (first / T::ROWS + expert)) * T::ROWS, rows = least(T::ROWS, end - row);
    if (rows <= 0) return;
    if (expert == EXPERTS) {
        for (int i = threadIdx.x; i < rows * columns; i += T::THREADS)
            store(y[i64(row + i / columns) * N + column + i % columns], 0.0f);
        return;
    }
    for (int i = threadIdx.x; i < rows; i += T::THREADS)
        sources[i] = source_row<SLOTS, GATHER, PER>(order, row + i, status, launch);
    __syncthreads();
    const E *matrix = w + i64(expert) * OUT * INNER;
    typename T::Sums sums;
    T::template multiply<true, !TRANSPOSED>(
        shared, sums, rows, columns, K, [&](int i, int k) { return x + (i64(sources[i]) * K + k); },
        [&](int j, int k) {
            return matrix + (TRANSPOSED ? i64(k) * INNER + column + j : i64(column + j) * INNER + k);
        });
    each<T>(sums, rows, columns, [&](int i, int j) {
        E *to = y + i64(row + i) * N + column + j;
        return [=](int at, float sum) { store(to[at], sum); };
    });
}

// `w[e, o, i] (+)= Σ_s y[s, o] · x[s, i]` over the rows of group `e`.
template <class T, int SLOTS, int EXPERTS, int OUT, int INNER, bool GATHER, int PER, bool ADD, class E>
DEVICE void grouped_outer(const E *y, const E *x, const int *offsets, const int *order, float *w, int *status,
                          int launch) {
    __shared__ typename T::Shared shared;
    check_offsets<SLOTS, EXPERTS>(offsets, status, launch);
    u32 block = blockIdx.x;
    int column = int(take(block, (INNER + T::COLUMNS - 1) / T::COLUMNS)) * T::COLUMNS;
    int row = int(take(block, (OUT + T::ROWS - 1) / T::ROWS)) * T::ROWS, expert = int(block);
    int rows = least(T::ROWS, OUT - row), columns = least(T::COLUMNS, INNER - column);
    int first = offset_of(offsets, expert, SLOTS), end = offset_of(offsets, expert + 1, SLOTS);
    if (ADD && first >= end) return;
    typename T::Sums sums;
    T::template multiply<false, false>(
        shared, sums, rows, columns, end - first,
        [&](int i, int k) { return y + (i64(first + k) * OUT + row + i); },
        [&](int j, int k) {
            return x + (i64(source_row<SLOTS, GATHER, PER>(order, first + k, status, launch)) * INNER + column + j);
        });
    each<T>(sums, rows, columns, [&](int i, int j) {
        float *to = w + (i64(expert) * OUT + row + i) * INNER + column + j;
        return [=](int at, float sum) { to[at] = ADD ? to[at] + sum : sum; };
    });
}
