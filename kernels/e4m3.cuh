// Matrix products of codes of e4m3 on Hopper, as `hopper.cuh` has them of bf16. A line of an
// operand is a line of codes along the depth, and 128 of them share a scale, a power of two: the
// tensor cores add up the products of 128 codes, and threads add that, times both scales, to sums
// in f32 (DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, section 3.3.2, "Increasing
// Accumulation Precision").
#pragma once
#include "hopper.cuh"

// An operand: its codes, and the exponents of its scales, those of one tile of all lines in a row.
// The copy engine takes two bytes for an element.
struct Coded {
    const TensorMap *codes, *exponents;
};

// The same from some line and depth on.
struct CodedBoxes {
    const TensorMap *codes, *exponents;
    int line, depth;
    DEVICE CodedBoxes at(int more_lines, int more_depth) const { return {codes, exponents, line + more_lines, depth + more_depth}; }
};

template <bool FAST, int NEAR = 1> DEVICE CodedBoxes operand(const Coded &coded, u32) {
    static_assert(FAST && NEAR == 1, "codes are adjacent along the depth");
    return {coded.codes, coded.exponents, 0, 0};
}

// A tile of two warpgroups, 64 rows each, and a warp that brings codes of 128 terms and their
// exponents by the copy engine. A warpgroup multiplies while the other one adds to its sums.
// `BLOCKS` of a cluster have tiles of the same columns: each brings a part of the right operand to
// all of them.
template <int STAGES, bool PAIRS_, int BLOCKS_ = 1> struct Codes {
    static constexpr bool PAIRS = PAIRS_, QUADS = PAIRS, STREAMS = true;
    static constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 128, X = COLUMNS / 8, BLOCKS = BLOCKS_;
    static constexpr int MULTIPLIERS = 256, THREADS = MULTIPLIERS + 32;
    // Boxes begin where the swizzle does. One of exponents is the first row of its pattern, which
    // is as it is in memory.
    static constexpr u32 A_BYTES = ROWS * DEPTH, B_BYTES = COLUMNS * DEPTH, B = A_BYTES, A_EXPONENTS = B + B_BYTES;
    static constexpr u32 B_EXPONENTS = A_EXPONENTS + 1024, STAGE_BYTES = B_EXPONENTS + 1024;
    static constexpr u32 OWN_BYTES = A_BYTES + B_BYTES + ROWS + COLUMNS;

    typedef float Sums[X][4];
    typedef Ring<STAGES, 1, MULTIPLIERS / 32, BLOCKS> Stages;
    typedef typename Stages::Shared Shared;

    struct Pipe : Stages {
        u32 tiles;
        DEVICE explicit Pipe(Shared &shared) : Stages(shared), tiles(tiles_memory()) {}
        DEVICE u32 tile() const { return tiles + u32(this->stage) * STAGE_BYTES; }
    };

    static constexpr int OWN_ROWS = 2, OWN_COLUMNS = 2 * X, SHARERS = 4;
    static DEVICE int row(int i) { return int(threadIdx.x) / 32 * 16 + i * 8 + int(threadIdx.x) % 32 / 4; }
    static DEVICE int column(int j) { return j / 2 * 8 + int(threadIdx.x) % 4 * 2 + j % 2; }
    static DEVICE float &at(Sums &sums, int i, int j) { return sums[j / 2][i * 2 + j % 2]; }

    static DEVICE void bring(Pipe &pipe, int steps, CodedBoxes a, CodedBoxes b) {
        bool first_lane = threadIdx.x % 32 == 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, pipe.next()) {
            pipe.wait_empty();
            if (first_lane) {
                u32 tile = pipe.tile(), full = pipe.full();
                int depth = (a.depth + step * DEPTH) / 2, number = (a.depth + step * DEPTH) / DEPTH;
                barrier_expect(full, OWN_BYTES);
                copy_box(tile, a.codes, depth, a.line, 0, full);
                if constexpr (BLOCKS > 1) {
                    constexpr int PART = COLUMNS / BLOCKS;
                    int part = int(blockIdx.x) % BLOCKS * PART;
                    copy_box_to(tile + B + u32(part) * DEPTH, b.codes, depth, b.line + part, 0, full, (1u << BLOCKS) - 1);
                } else copy_box(tile + B, b.codes, depth, b.line, 0, full);
                copy_box(tile + A_EXPONENTS, a.exponents, a.line / 2, number, 0, full);
                copy_box(tile + B_EXPONENTS, b.exponents, b.line / 2, number, 0, full);
            }
            // Lanes that told nobody must have seen the stage empty before it is filled.
            __syncwarp();
            if (first_lane) barrier_arrive(pipe.full());
        }
        __syncwarp();
    }

    // 2 to the exponent in the lower or the upper byte.
    static DEVICE float low(u32 bytes) { return __uint_as_float(bytes << 23 & 0x7f800000u); }
    static DEVICE float high(u32 bytes) { return __uint_as_float(bytes << 15 & 0x7f800000u); }

    // Whether all columns have one scale, that of the thread's first two. A weight's do.
    static DEVICE bool one_scale(u32 exponents, u32 first) {
        u32 others = (first ^ first >> 8) & 0xffu;
#pragma unroll
        for (int j = 1; j < X; ++j) others |= two_bytes(exponents + u32(column(2 * j))) ^ first;
        return !__any_sync(ALL_LANES, others != 0);
    }

    static DEVICE void consume(Pipe &pipe, Sums &sums, int steps) {
        u32 half = threadIdx.x / 128 * 8192, at = u32(row(0));
        Sums part;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, pipe.next()) {
            u32 tile = pipe.tile(), exponents = tile + B_EXPONENTS;
            pipe.wait_full();
            matrices_begin();
#pragma unroll
            for (int d = 0; d < DEPTH / 32; ++d)
                multiply_codes(part, tile_at(tile + half + u32(d * 32), 8192), tile_at(tile + B + u32(d * 32), 8192), d);
            matrices_commit();
            float of_rows[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                of_rows[i] = low(two_bytes(tile + A_EXPONENTS + (at + u32(i * 8)) / 2 * 2) >> at % 2 * 8);
            u32 first = two_bytes(exponents + u32(column(0)));
            bool one = one_scale(exponents, first);
            matrices_wait<0>();
            if (one) {
                float scales[2] = {of_rows[0] * low(first), of_rows[1] * low(first)};
#pragma unroll
                for (int j = 0; j < X; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[j][e] = fmaf(part[j][e], scales[e / 2], sums[j][e]);
            } else {
#pragma unroll
                for (int j = 0; j < X; ++j) {
                    u32 bytes = two_bytes(exponents + u32(column(2 * j)));
                    float of_columns[2] = {low(bytes), high(bytes)};
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        sums[j][e] = fmaf(part[j][e], of_rows[e / 2] * of_columns[e % 2], sums[j][e]);
                }
            }
            // All lanes have read their exponents.
            __syncwarp();
            pipe.release(0);
        }
        __syncwarp();
    }

    // A block of a cluster stays until no other writes to its shared memory.
    static DEVICE void part() {
        __syncwarp();
        meet_cluster();
    }

    // The threads that bring give zeros.
    template <bool A_FAST, bool B_FAST>
    static DEVICE void multiply(Pipe &pipe, Sums &sums, int, int, int k, CodedBoxes a, CodedBoxes b) {
#pragma unroll
        for (int j = 0; j < X; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[j][e] = 0.0f;
        int steps = k / DEPTH;
        if (threadIdx.x < MULTIPLIERS) consume(pipe, sums, steps);
        else bring(pipe, steps, a, b);
    }
};

// `c[m, n] (+)= Σ_k a[m, k] · b[n, k]`.
template <class T, bool ADD, class C>
DEVICE void product_e4m3(const TensorMap &a, const TensorMap &a_exponents, const TensorMap &b, const TensorMap &b_exponents, C *c,
                         int m, int n, int k) {
    product<T, true, true, ADD>(Coded{&a, &a_exponents}, Coded{&b, &b_exponents}, c, m, n, k, 0, 0);
}

// A slice of its sums, `depth` long.
template <class T>
DEVICE void product_slice_e4m3(const TensorMap &a, const TensorMap &a_exponents, const TensorMap &b, const TensorMap &b_exponents,
                               float *parts, int m, int n, int k, int depth) {
    product_slice<T, true, true>(Coded{&a, &a_exponents}, Coded{&b, &b_exponents}, parts, m, n, k, 0, 0, depth);
}
