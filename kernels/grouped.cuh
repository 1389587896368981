// Products of groups of rows with a matrix each, as mixtures of experts need them.
//
// `offsets` says where each group's rows begin. The grid is as large as the worst case needs; which
// group a block works for follows from the offsets: tiles of group `e` begin at
// `offsets[e] / ROWS + e`, which grows with `e`, leaves every group as many as it needs, and is
// found by bisection without a list.
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

// The slot whose row of `x` a gathering slot reads.
DEVICE int source_slot(const int *order, int slot, int slots, int *status, int launch) {
    int source = order[slot];
    if (u32(source) < u32(slots)) return source;
    report(status, launch);
    return 0;
}

// The last group whose tiles begin at or before this one; rows in no group are one more. All lanes
// of a warp look together, each at a place of its own: two rounds for a thousand groups, where a
// thread alone would wait for memory ten times.
template <int ROWS> DEVICE int group_of(const int *offsets, int slots, int experts, int tile) {
    int low = 0, left = experts, lane = int(threadIdx.x) % 32;
    while (left > 0) {
        int step = (left + 31) / 32, at = low + (lane + 1) * step;
        bool begun = (lane + 1) * step <= left && offset_of(offsets, at, slots) / ROWS + at <= tile;
        int many = __popc(__ballot_sync(ALL_LANES, begun)) * step;
        low += many;
        left = least(left - many, step - 1);
    }
    return low;
}

// `y[s, n] = Σ_k x[s, k] · w[e, n, k]`, or `w[e, k, n]` where `TRANSPOSED`; rows in no group are
// zeroed. Row of `x` for a gathered slot: that divided by `per`.
template <class T, bool TRANSPOSED, bool GATHER, class X, class W, class C>
DEVICE void grouped(const X &x, const W &w, const int *offsets, const int *order, C *y, int slots, int experts, int n,
                    int k, u32 per, int *status, int launch) {
    __shared__ typename T::Shared shared;
    check_offsets(offsets, slots, experts, status, launch);
    typename T::Pipe pipe(shared);
    u32 across = tiles_over(n, T::COLUMNS);
    auto each_tile = [&](u32 block) {
        int column = int(take(block, across)) * T::COLUMNS, tile = int(block);
        int columns = least(T::COLUMNS, n - column);
        int expert = group_of<T::ROWS>(offsets, slots, experts, tile), first = offset_of(offsets, expert, slots);
        int end = expert < experts ? offset_of(offsets, expert + 1, slots) : slots;
        int row = first + (tile - (first / T::ROWS + expert)) * T::ROWS, rows = least(T::ROWS, end - row);
        if (rows <= 0) return;
        C *to = y + (i64(row) * n + column);
        if (expert == experts) {
#pragma unroll 1
            for (int i = threadIdx.x; i < rows * columns; i += T::THREADS)
                store(to[i64(i / columns) * n + i % columns], 0.0f);
            return;
        }
        auto lines = operand<true>(x, k);
        auto matrix = operand<!TRANSPOSED>(w, TRANSPOSED ? n : k).of(expert, i64(n) * k).at(column, 0);
        typename T::Sums sums;
        if constexpr (GATHER) {
            __shared__ int sources[T::ROWS];
            for (int i = threadIdx.x; i < rows; i += T::THREADS)
                sources[i] = int(u32(source_slot(order, row + i, slots, status, launch)) / per);
            __syncthreads();
            T::template multiply<true, !TRANSPOSED>(pipe, sums, rows, columns, k, pick(lines, sources), matrix);
        } else T::template multiply<true, !TRANSPOSED>(pipe, sums, rows, columns, k, lines.at(row, 0), matrix);
        each<T>(sums, rows, columns, [&](int i, int j) { return put<false>(to + (i64(i) * n + j)); });
    };
    // All threads of a block look up the rows that it gathers. The worst case: every group, and the
    // rows in none, leave one tile unfilled.
    if constexpr (GATHER) each_tile(blockIdx.x);
    else tiles_of_block<T>(across * u32(slots / T::ROWS + experts + 1), each_tile);
}

// `w[e, o, i] (+)= Σ_s y[s, o] · x[s, i]` over the rows of group `e`. `PER` is a constant here:
// rows are looked up all along.
template <class T, bool GATHER, int PER, bool ADD, class Y, class X>
DEVICE void grouped_outer(const Y &y, const X &x, const int *offsets, const int *order, float *w, int slots, int experts,
                          int out, int inner, int *status, int launch) {
    __shared__ typename T::Shared shared;
    check_offsets(offsets, slots, experts, status, launch);
    u32 block = blockIdx.x;
    int column = int(take(block, tiles_over(inner, T::COLUMNS))) * T::COLUMNS;
    int row = int(take(block, tiles_over(out, T::ROWS))) * T::ROWS, expert = int(block);
    int rows = least(T::ROWS, out - row), columns = least(T::COLUMNS, inner - column);
    int first = offset_of(offsets, expert, slots), end = offset_of(offsets, expert + 1, slots);
    if (ADD && first >= end) return;
    w += (i64(expert) * out + row) * inner + column;
    auto left = operand<false>(y, out).at(row, first).cut();
    typename T::Sums sums;
    typename T::Pipe pipe(shared);
    if constexpr (GATHER) {
        auto lines = operand<false>(x, inner).at(column, 0);
        auto source = [&](int k) { return source_slot(order, first + k, slots, status, launch) / PER; };
        T::template multiply<false, false>(pipe, sums, rows, columns, end - first, left, pick_depths(lines, source));
    } else {
        T::template multiply<false, false>(pipe, sums, rows, columns, end - first, left,
                                           operand<false>(x, inner).at(column, first).cut());
    }
    each<T>(sums, rows, columns, [&](int i, int j) { return put<ADD>(w + (i64(i) * inner + j)); });
}
