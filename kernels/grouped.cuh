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
DEVICE void check_offsets(const int *offsets, int slots, int experts, int *status, int launch) {
    if (blockIdx.x > 0) return;
    for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
        int before = e == 0 ? 0 : offsets[e - 1], offset = offsets[e];
        if (offset < before || offset > slots || (e == 0 && offset != 0)) report(status, launch);
    }
}

// The slot whose row of `x` a slot reads: itself, or `order[slot]`.
template <bool GATHER> DEVICE int source_slot(const int *order, int slot, int slots, int *status, int launch) {
    if (!GATHER) return slot;
    int source = order[slot];
    if (u32(source) < u32(slots)) return source;
    report(status, launch);
    return 0;
}

// `y[s, n] = Σ_k x[s, k] · w[e, n, k]`, or `w[e, k, n]` where `TRANSPOSED`; rows in no group are zeroed. Row of `x` for a gathered slot:
// that divided by `per`.
template <class T, bool TRANSPOSED, bool GATHER, class E, class C>
DEVICE void grouped(const E *x, const E *w, const int *offsets, const int *order, C *y, int slots, int experts, int n,
                    int k, u32 per, int *status, int launch) {
    __shared__ typename T::Shared shared;
    __shared__ int sources[T::ROWS];
    check_offsets(offsets, slots, experts, status, launch);
    u32 block = blockIdx.x;
    int column = int(take(block, tiles_over(n, T::COLUMNS))) * T::COLUMNS, tile = int(block);
    int columns = least(T::COLUMNS, n - column);
    // The last group whose tiles begin at or before this one; rows in no group are one more.
    int low = 0, high = experts;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (offset_of(offsets, middle, slots) / T::ROWS + middle <= tile) low = middle;
        else high = middle - 1;
    }
    int expert = low, first = offset_of(offsets, expert, slots);
    int end = expert < experts ? offset_of(offsets, expert + 1, slots) : slots;
    int row = first + (tile - (first / T::ROWS + expert)) * T::ROWS, rows = least(T::ROWS, end - row);
    if (rows <= 0) return;
    if (expert == experts) {
#pragma unroll 1
        for (int i = threadIdx.x; i < rows * columns; i += T::THREADS)
            store(y[i64(row + i / columns) * n + column + i % columns], 0.0f);
        return;
    }
    for (int i = threadIdx.x; i < rows; i += T::THREADS)
        sources[i] = int(u32(source_slot<GATHER>(order, row + i, slots, status, launch)) / (GATHER ? per : 1));
    __syncthreads();
    w += i64(expert) * n * k + (TRANSPOSED ? column : i64(column) * k);
    y += i64(row) * n + column;
    typename T::Sums sums;
    T::template multiply<true, !TRANSPOSED>(
        shared, sums, rows, columns, k, [&](int i, int at) { return x + (i64(sources[i]) * k + at); },
        [&](int j, int at) { return w + element<!TRANSPOSED, 1>(j, at, TRANSPOSED ? n : k); });
    each<T>(sums, rows, columns, [&](int i, int j) {
        E *to = y + (i64(i) * n + j);
        return [=](int at, float sum) { store(to[at], sum); };
    });
}

// `w[e, o, i] (+)= Σ_s y[s, o] · x[s, i]` over the rows of group `e`. `PER` is a constant here: rows are looked up all along.
template <class T, bool GATHER, int PER, bool ADD, class E>
DEVICE void grouped_outer(const E *y, const E *x, const int *offsets, const int *order, float *w, int slots, int experts,
                          int out, int inner, int *status, int launch) {
    __shared__ typename T::Shared shared;
    check_offsets(offsets, slots, experts, status, launch);
    u32 block = blockIdx.x;
    int column = int(take(block, tiles_over(inner, T::COLUMNS))) * T::COLUMNS;
    int row = int(take(block, tiles_over(out, T::ROWS))) * T::ROWS, expert = int(block);
    int rows = least(T::ROWS, out - row), columns = least(T::COLUMNS, inner - column);
    int first = offset_of(offsets, expert, slots), end = offset_of(offsets, expert + 1, slots);
    if (ADD && first >= end) return;
    y += i64(first) * out + row;
    x += (GATHER ? 0 : i64(first) * inner) + column;
    order += GATHER ? first : 0;
    w += (i64(expert) * out + row) * inner + column;
    typename T::Sums sums;
    T::template multiply<false, false>(
        shared, sums, rows, columns, end - first, [&](int i, int k) { return y + element<false, 1>(i, k, out); },
        [&](int j, int k) {
            int source = source_slot<GATHER>(order, k, slots, status, launch) / PER;
            return x + element<false, 1>(j, source, inner);
        });
    each<T>(sums, rows, columns, [&](int i, int j) {
        float *to = w + (i64(i) * inner + j);
        return [=](int at, float sum) { to[at] = ADD ? to[at] + sum : sum; };
    });
}
