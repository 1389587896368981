// Tiles of numbers rounded to e4m3 in units of a scale, a power of two: every result is a number of
// bf16. Numbers below 2^-6 units become multiples of 2^-9. Results are stored as bf16, or as codes
// with the exponents of scales after them.
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

// --- codes ---------------------------------------------------------------------------------------

// The scale of a tile, by the bits of its largest magnitude, as codes are found and stored with it.
struct CodeScale {
    float per;
    u32 byte;
    bool none;
    DEVICE explicit CodeScale(u32 largest) : none(largest >= 0x7f800000u) {
        int k = none ? 0 : fp8_exponent(largest);
        per = __uint_as_float(u32(127 - k) << 23);
        byte = u32(127 + k);
    }

    // The code of a number, rounded to nearest even; of a tile without a scale that of no number.
    DEVICE u32 code(float x) const {
        u32 bits = __float_as_uint(x * per), size = bits & 0x7fffffffu;
        // Units of 2^-9, and numbers from 2^-6 on by their exponent and three bits more.
        u32 small = __float_as_uint(__fadd_rn(__uint_as_float(size), 16384.0f)) - 0x46800000u;
        u32 normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - 960u;
        return none ? 0x7fu : (size < 0x3c800000u ? small : normal) | (bits >> 24 & 0x80u);
    }
};

DEVICE u32 largest_of_warp(u32 largest) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    return largest;
}

// Tiles of 128 numbers of a row: a block has eight rows, a warp some adjacent tiles of one, a lane
// four adjacent numbers of each.
template <class E> DEVICE void e4m3_rows(const E *x, u8 *y, int rows, int columns) {
    constexpr int TILES = 4;
    int across = columns / 128, groups = (across + TILES - 1) / TILES, lane = int(threadIdx.x) % 32;
    int first = int(blockIdx.x) % groups * TILES;
    i64 row = i64(blockIdx.x) / groups * 8 + threadIdx.x / 32;
    Floats<4> numbers[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
        if (first + i < across) numbers[i] = load<4>(x + (row * columns + (first + i) * 128 + lane * 4));
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        if (first + i >= across) break;
        u32 largest = 0, word = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) largest = max(largest, size_of(numbers[i].x[e]));
        CodeScale scale(largest_of_warp(largest));
#pragma unroll
        for (int e = 0; e < 4; ++e) word |= scale.code(numbers[i].x[e]) << 8 * e;
        *reinterpret_cast<u32 *>(y + (row * columns + (first + i) * 128 + lane * 4)) = word;
        if (lane == 0) y[i64(rows) * columns + i64(first + i) * rows + row] = u8(scale.byte);
    }
}

// 128 x 128 numbers for each block, with one scale for all of them where `WHOLE`, else for each
// column. `TURNED`: the result's lines are columns, and a thread has 32 numbers of two of them,
// which it stores in whole sectors of 32 bytes; else it has 16 numbers of four columns.
template <bool TURNED, bool WHOLE, class E> DEVICE void e4m3_tiles(const E *x, u8 *y, int rows, int columns) {
    constexpr int OWN = TURNED ? 2 : 4, DOWN = 8 * 8 / OWN, ACROSS = 128 / OWN;
    static_assert(TURNED || WHOLE, "columns have scales of their own where they become lines");
    __shared__ u32 sizes[WHOLE ? 1 : 128];
    int across = (columns + 127) / 128, thread = int(threadIdx.x);
    int down = int(blockIdx.x) / across, at = int(blockIdx.x) % across;
    int row = down * 128 + thread / ACROSS * DOWN, column = at * 128 + thread % ACROSS * OWN;
    for (int i = thread; i < (WHOLE ? 1 : 128); i += int(blockDim.x)) sizes[i] = 0;
    float numbers[DOWN][OWN];
#pragma unroll
    for (int i = 0; i < DOWN; ++i) {
        bool inside = row + i < rows && column < columns;
#pragma unroll
        for (int e = 0; e < OWN; e += 2) {
            TwoFloats pair = inside ? load_pair(x + (i64(row + i) * columns + column + e)) : TwoFloats{0.0f, 0.0f};
            numbers[i][e] = pair.low, numbers[i][e + 1] = pair.high;
        }
    }
    u32 largest[OWN];
#pragma unroll
    for (int e = 0; e < OWN; ++e) {
        largest[e] = 0;
#pragma unroll
        for (int i = 0; i < DOWN; ++i) largest[e] = max(largest[e], size_of(numbers[i][e]));
    }
    __syncthreads();
    if (WHOLE) {
#pragma unroll
        for (int e = 1; e < OWN; ++e) largest[0] = max(largest[0], largest[e]);
        largest[0] = largest_of_warp(largest[0]);
        if (thread % 32 == 0) atomicMax(&sizes[0], largest[0]);
    } else {
#pragma unroll
        for (int e = 0; e < OWN; ++e) atomicMax(&sizes[thread % ACROSS * OWN + e], largest[e]);
    }
    __syncthreads();
    auto scale_of = [&](int e) { return CodeScale(sizes[WHOLE ? 0 : thread % ACROSS * OWN + e]); };
    u8 *scales = y + i64(rows) * columns;
    if (TURNED) {
        if (column >= columns) return;
#pragma unroll
        for (int e = 0; e < OWN; ++e) {
            CodeScale scale = scale_of(e);
            u32 words[DOWN / 4];
#pragma unroll
            for (int i = 0; i < DOWN; ++i) {
                u32 code = scale.code(numbers[i][e]) << 8 * (i % 4);
                words[i / 4] = i % 4 == 0 ? code : words[i / 4] | code;
            }
            uint4 *to = reinterpret_cast<uint4 *>(y + (i64(column + e) * rows + row));
#pragma unroll
            for (int i = 0; i < DOWN / 16; ++i) to[i] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
            if (thread < ACROSS) scales[i64(down) * columns + column + e] = u8(scale.byte);
        }
    } else {
        CodeScale scale = scale_of(0);
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
            if (row + i >= rows || column >= columns) continue;
            u32 word = 0;
#pragma unroll
            for (int e = 0; e < OWN; ++e) word |= scale.code(numbers[i][e]) << 8 * e;
            *reinterpret_cast<u32 *>(y + (i64(row + i) * columns + column)) = word;
        }
        if (thread < 128 && down * 128 + thread < rows) scales[i64(at) * rows + down * 128 + thread] = u8(scale.byte);
    }
}
