// Tiles of numbers rounded to e4m3 in units of a scale, a power of two: every result is a number of
// bf16. Numbers below 2^-6 units become multiples of 2^-9.
#pragma once
#include "prelude.cuh"

DEVICE u32 size_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The exponent of a tile's scale, by the bits of its largest magnitude: the least at which that is
// at most 448.
DEVICE int fp8_exponent(u32 largest) {
    int k = int(largest >> 23) - 127 - 8 + int((largest & 0x7fffffu) > 0x600000u);
    return k > -100 ? k : -100;
}

// A number in units of the scale, rounded to nearest even, times the scale.
DEVICE float fp8_round(float x, u32 largest) {
    int k = fp8_exponent(largest);
    float number = x * __uint_as_float(u32(127 - k) << 23);
    u32 bits = __float_as_uint(number), size = bits & 0x7fffffffu;
    u32 small = __float_as_uint(__fsub_rn(__fadd_rn(__uint_as_float(size), 16384.0f), 16384.0f));
    u32 normal = (size + 0x7ffffu + (size >> 20 & 1u)) & 0xfff00000u;
    u32 rounded = (size < 0x3c800000u ? small : normal) | (bits & 0x80000000u);
    return largest < 0x7f800000u ? __uint_as_float(rounded) * __uint_as_float(u32(127 + k) << 23) : __uint_as_float(0x7fc00000u);
}

// Tiles of one row: a warp has one, a lane every 32nd number of it.
template <int ROWS, int COLUMNS, int WIDE, class E>
DEVICE void fp8_rows(const E *x, bf16 *y) {
    constexpr int ACROSS = (COLUMNS + WIDE - 1) / WIDE, EACH = (WIDE + 31) / 32;
    i64 tile = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (tile >= i64(ROWS) * ACROSS) return;
    i64 row = tile / ACROSS;
    int first = int(tile % ACROSS) * WIDE, lane = int(threadIdx.x % 32);
    int count = COLUMNS - first < WIDE ? COLUMNS - first : WIDE;
    float numbers[EACH];
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int column = lane + 32 * i;
        numbers[i] = column < count ? to_float(x[row * COLUMNS + first + column]) : 0.0f;
        largest = max(largest, size_of(numbers[i]));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, distance));
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int column = lane + 32 * i;
        if (column < count) store(y[row * COLUMNS + first + column], fp8_round(numbers[i], largest));
    }
}

// The rows of tile `down`, where groups begin tiles anew: [first, last), empty where there is none.
template <int ROWS, int HIGH, int GROUPS>
DEVICE bool fp8_of_group(const int *offsets, int down, int &first, int &last, int *status, int launch) {
    int begin = 0;
    for (int e = 0; e <= GROUPS; ++e) {
        int end = e < GROUPS ? offsets[e + 1] : ROWS;
        if (end < begin || end > ROWS) {
            if (threadIdx.x == 0) report(status, launch);
            return false;
        }
        int tiles = (end - begin + HIGH - 1) / HIGH;
        if (down < tiles) {
            first = begin + down * HIGH;
            last = min(first + HIGH, end);
            return true;
        }
        down -= tiles;
        begin = end;
    }
    return false;
}

// Tiles of several rows. A block has `SPAN` columns of them, and a thread one column: numbers are
// read once for the scale and once more, from the cache.
template <int ROWS, int COLUMNS, int WIDE, int SPAN, int THREADS, class E>
DEVICE void fp8_block(const E *x, bf16 *y, i64 matrix, int first, int last, int from) {
    constexpr int TILES = (SPAN + WIDE - 1) / WIDE;
    __shared__ u32 sizes[TILES];
    int column = int(threadIdx.x) % SPAN, tile = column / WIDE;
    if (int(threadIdx.x) < TILES) sizes[threadIdx.x] = 0;
    __syncthreads();
    bool there = from + column < COLUMNS;
    u32 largest = 0;
    const E *at = x + matrix * ROWS * COLUMNS + from + column;
    for (int row = first + int(threadIdx.x) / SPAN; row < last && there; row += THREADS / SPAN) {
        largest = max(largest, size_of(to_float(at[i64(row) * COLUMNS])));
    }
    atomicMax(&sizes[tile], largest);
    __syncthreads();
    largest = sizes[tile];
    bf16 *to = y + matrix * ROWS * COLUMNS + from + column;
    for (int row = first + int(threadIdx.x) / SPAN; row < last && there; row += THREADS / SPAN) {
        store(to[i64(row) * COLUMNS], fp8_round(to_float(at[i64(row) * COLUMNS]), largest));
    }
}

template <int ROWS, int COLUMNS, int HIGH, int WIDE, int SPAN, int THREADS, class E>
DEVICE void fp8_tiles(const E *x, bf16 *y) {
    constexpr int ACROSS = (COLUMNS + SPAN - 1) / SPAN, DOWN = (ROWS + HIGH - 1) / HIGH;
    int down = int(blockIdx.x / ACROSS % DOWN);
    i64 matrix = blockIdx.x / ACROSS / DOWN;
    int first = down * HIGH, from = int(blockIdx.x % ACROSS) * SPAN;
    fp8_block<ROWS, COLUMNS, WIDE, SPAN, THREADS>(x, y, matrix, first, min(first + HIGH, ROWS), from);
}

template <int ROWS, int COLUMNS, int HIGH, int WIDE, int SPAN, int THREADS, int GROUPS, class E>
DEVICE void fp8_groups(const E *x, const int *offsets, bf16 *y, int *status, int launch) {
    constexpr int ACROSS = (COLUMNS + SPAN - 1) / SPAN;
    int first, last, from = int(blockIdx.x % ACROSS) * SPAN;
    if (!fp8_of_group<ROWS, HIGH, GROUPS>(offsets, int(blockIdx.x / ACROSS), first, last, status, launch)) return;
    fp8_block<ROWS, COLUMNS, WIDE, SPAN, THREADS>(x, y, 0, first, last, from);
}
