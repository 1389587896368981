// Products of 2 to 16 rows with packed matrices on tensor cores: several texts that are decoded
// together, or a few tokens that are verified.
//
// A warp has 16 rows of the matrix as the left operand of `mma`, and eight or 16 rows of `x` as the
// right one. Codes of blocks are exact in bf16; products of a block's codes are scaled by its scale
// in f32. So a result is as exact as its `x`: where results are bf16, `x` is rounded to bf16, else
// it is the sum of three numbers of bf16. The order of steps within a block is free, as long as
// both operands have it: a lane takes adjacent bytes of its row.
#pragma once
#include "few.cuh"

// Chunks of each row that are in shared memory; `codegen/blocks.rs` has the numbers again.
constexpr int SEVERAL_STAGES = 2;
// Rows of the matrix that a warp has.
constexpr int SEVERAL_OWN = 16;

// Pairs of bf16: 1, 2^126, the one with all bits of its fraction's place free (128), and -0.
constexpr u32 ONES = 0x3f803f80u, LARGE = 0x7e807e80u, FREE = 0x43004300u, NOTHING = 0x80008000u;

// Bytes `2 half` and `2 half + 1` of a word, 16 bits apart.
DEVICE u32 apart(u32 word, int half) { return __byte_perm(word, 0, half ? 0x4342 : 0x4140); }

// Codes 16 bits apart, of at most seven bits each, as bf16 less a bias; `bias` is the pair of
// -128 and the negative bias in bf16.
DEVICE u32 codes_of(u32 codes, u32 bias) { return fma_pairs(codes | FREE, ONES, bias); }

// Codes of E2M1 16 bits apart in bf16, by `factors`, a pair, and 2^-126.
DEVICE u32 e2m1_of(u32 codes, u32 factors) {
    return fma_pairs((codes & 0x00070007u) << 6 | (codes & 0x00080008u) << 12, factors, NOTHING);
}

// Eight bits of a word, signed, as a pair of bf16.
DEVICE u32 eights_of(u32 word, int half, u32 whole) {
    u32 codes = word ^ 0x80808080u;
    return pack(code_at<8>(codes, 16 * half, 128.0f, whole), code_at<8>(codes, 16 * half + 8, 128.0f, whole));
}

// A lane's part of a group of numbers of a row, which four lanes share: pairs for `STEPS` steps of
// `mma`. A scale is that of `FOLD` steps; 0: one of the whole row, `last`. Chunks have `NUMBERS`
// numbers in `BYTES`; rows begin with `HEAD` bytes that no chunk has. Where rows may end within a
// group (`TAIL`) what is after them is 0. A format whose numbers are not exact in bf16 has `LESS`,
// what is left of them.
template <class F> struct Quarter;

template <> struct Quarter<F16> {
    static constexpr int HEAD = 0, BYTES = 256, NUMBERS = 128, GROUP = 32, STEPS = 2, FOLD = 0;
    static constexpr bool OFFSET = false, TAIL = true, LESS = true;
    u32 words[4];
    DEVICE void take(const u8 *memory, int chunk, int group, int t) { words_at(words, memory, chunk + 64 * group + 16 * t); }
    static DEVICE int place(int group, int t, int step) { return 32 * group + 8 * t + 4 * step; }
    DEVICE TwoFloats two(int step, int half) const {
        u32 word = words[2 * step + half];
        return {half_float(word), half_float(word >> 16)};
    }
    DEVICE u32 pair(int step, int half, u32) const {
        TwoFloats x = two(step, half);
        return pack(x.low, x.high);
    }
    DEVICE u32 less(int step, int half) const {
        TwoFloats x = two(step, half);
        u32 much = pack(x.low, x.high);
        return pack(x.low - float_of(much << 16), x.high - float_of(much & 0xffff0000u));
    }
    static DEVICE float last(float) { return 1.0f; }
    DEVICE float factor(int) const { return 1.0f; }
    DEVICE float offset(int) const { return 0.0f; }
};

// Formats whose codes are exact.
struct Exact {
    static constexpr bool OFFSET = false, TAIL = false, LESS = false;
    DEVICE u32 less(int, int) const { return 0; }
    DEVICE float offset(int) const { return 0.0f; }
    static DEVICE float last(float) { return 1.0f; }
};

template <int ROW> struct Quarter<Int8<ROW>> : Exact {
    static constexpr int HEAD = 4, BYTES = 256, NUMBERS = 256, GROUP = 64, STEPS = 4, FOLD = 0;
    static constexpr bool TAIL = true;
    u32 words[4];
    DEVICE void take(const u8 *memory, int chunk, int group, int t) { words_at(words, memory, chunk + 64 * group + 16 * t); }
    static DEVICE int place(int group, int t, int step) { return 64 * group + 16 * t + 4 * step; }
    DEVICE u32 pair(int step, int half, u32 whole) const { return eights_of(words[step], half, whole); }
    static DEVICE float last(float head) { return head; }
    DEVICE float factor(int) const { return 1.0f; }
};

template <> struct Quarter<Q8> : Exact {
    static constexpr int HEAD = 0, BYTES = 272, NUMBERS = 256, GROUP = 32, STEPS = 2, FOLD = 2;
    u32 words[2];
    float scale;
    DEVICE void take(const u8 *memory, int chunk, int group, int t) {
        int block = chunk + 34 * group;
        scale = half_float(half_at(memory + block));
        words_at(words, memory, block + 2 + 8 * t);
    }
    static DEVICE int place(int group, int t, int step) { return 32 * group + 8 * t + 4 * step; }
    DEVICE u32 pair(int step, int half, u32 whole) const { return eights_of(words[step], half, whole); }
    DEVICE float factor(int) const { return scale; }
};

template <> struct Quarter<Q4> : Exact {
    static constexpr int HEAD = 0, BYTES = 288, NUMBERS = 512, GROUP = 32, STEPS = 2, FOLD = 2;
    u32 words[1];
    float scale;
    DEVICE void take(const u8 *memory, int chunk, int group, int t) {
        int block = chunk + 18 * group;
        scale = half_float(half_at(memory + block));
        words_at(words, memory, block + 2 + 4 * t);
    }
    static DEVICE int place(int group, int t, int step) { return 32 * group + 16 * step + 4 * t; }
    // Less 8.
    DEVICE u32 pair(int step, int half, u32) const {
        return codes_of(apart(words[0] >> (4 * step) & 0x0f0f0f0fu, half), 0xc308c308u);
    }
    DEVICE float factor(int) const { return scale; }
};

template <> struct Quarter<Mxfp4> : Exact {
    static constexpr int HEAD = 0, BYTES = 272, NUMBERS = 512, GROUP = 32, STEPS = 2, FOLD = 2;
    u32 words[1];
    float scale;
    DEVICE void take(const u8 *memory, int chunk, int group, int t) {
        int block = chunk + 17 * group;
        scale = half_of_power(memory[block]) * 2.0f;
        words_at(words, memory, block + 1 + 4 * t);
    }
    static DEVICE int place(int group, int t, int step) { return Quarter<Q4>::place(group, t, step); }
    DEVICE u32 pair(int step, int half, u32) const { return e2m1_of(apart(words[0] >> (4 * step), half), LARGE); }
    DEVICE float factor(int) const { return scale; }
};

// A lane has a whole block of 16. A number by its block's scale has six bits: exact in bf16.
template <int ROW> struct Quarter<Nvfp4<ROW>> : Exact {
    static constexpr int HEAD = 4, BYTES = 288, NUMBERS = 512, GROUP = 64, STEPS = 4, FOLD = 0;
    u32 words[2], scales;
    DEVICE void take(const u8 *memory, int chunk, int group, int t) {
        int block = chunk + 36 * group;
        // By 2^110, so that it is in the range of bf16.
        float scale = e4m3(memory[block + t]) * float_of(237u << 23);
        scales = pack(scale, scale);
        words_at(words, memory, block + 4 + 8 * t);
    }
    static DEVICE int place(int group, int t, int step) { return 64 * group + 16 * t + 4 * step; }
    DEVICE u32 pair(int step, int half, u32) const { return e2m1_of(apart(words[step % 2] >> (step / 2 * 4), half), scales); }
    static DEVICE float last(float head) { return head * 65536.0f; }
    DEVICE float factor(int) const { return 1.0f; }
};

template <> struct Quarter<Q4K> : Exact {
    static constexpr int HEAD = 0, BYTES = 288, NUMBERS = 512, GROUP = 64, STEPS = 4, FOLD = 2;
    static constexpr bool OFFSET = true;
    u32 words[2];
    PartScales scales;
    DEVICE void take(const u8 *memory, int chunk, int group, int t) {
        int block = chunk + 144 * (group / 4), pair = group % 4;
        scales.take(memory, block, pair);
        words_at(words, memory, block + 16 + 32 * pair + 8 * t);
    }
    static DEVICE int place(int group, int t, int step) { return 64 * group + 32 * (step / 2) + 8 * t + 4 * (step % 2); }
    DEVICE u32 pair(int step, int half, u32) const {
        return codes_of(apart(words[step % 2] >> (step / 2 * 4) & 0x0f0f0f0fu, half), 0xc300c300u);
    }
    DEVICE float factor(int fold) const { return scales.factors[fold]; }
    DEVICE float offset(int fold) const { return scales.offsets[fold]; }
};

template <> struct Quarter<Q6K> : Exact {
    static constexpr int HEAD = 0, BYTES = 210, NUMBERS = 256, GROUP = 64, STEPS = 4, FOLD = 1;
    u32 low[2], high;
    float factors[4];
    DEVICE void take(const u8 *memory, int chunk, int group, int t) {
        int block = chunk + 210 * (group / 4), half = group % 4 / 2, within = 16 * (group % 2) + 4 * t;
        u32 one[1];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            words_at(one, memory, block + 64 * half + 32 * i + within);
            low[i] = one[0];
        }
        words_at(one, memory, block + 128 + 32 * half + within);
        high = one[0];
        float by = half_float(half_at(memory + block + 208));
        const u8 *scales = memory + block + 192 + 8 * half + group % 2;
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) factors[quarter] = by * float((signed char)scales[2 * quarter]);
    }
    static DEVICE int place(int group, int t, int step) {
        return 256 * (group / 4) + 128 * (group % 4 / 2) + 16 * (group % 2) + 32 * step + 4 * t;
    }
    // Less 32.
    DEVICE u32 pair(int step, int half, u32) const {
        u32 codes = (low[step % 2] >> (step / 2 * 4) & 0x0f0f0f0fu) | (high >> (2 * step) & 0x03030303u) << 4;
        return codes_of(apart(codes, half), 0xc320c320u);
    }
    DEVICE float factor(int fold) const { return factors[fold]; }
};

// Four numbers of `x` as `PARTS` pairs of pairs of bf16 whose sum they are, the largest last.
template <int PARTS> DEVICE void parts_of(u32 (&parts)[PARTS][2], Floats<4> x) {
#pragma unroll
    for (int part = PARTS - 1; part >= 0; --part) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 much = pack(x.x[2 * half], x.x[2 * half + 1]);
            parts[part][half] = much;
            x.x[2 * half] -= float_of(much << 16);
            x.x[2 * half + 1] -= float_of(much & 0xffff0000u);
        }
    }
}

// The same as `few` of `m` rows, whose addresses `x(i)` are, 8 `TILES` at most; a result goes to
// `put(i, j, sum)`. `PARTS` numbers of bf16 are one of `x`.
template <class F, int TILES, int SPLIT, int PARTS, class Row, class Put>
DEVICE void several(Row x, int m, const F *matrix, const F *past, i64 far, int n, int k, int tile, Put put) {
    typedef Quarter<F> Q;
    // An odd number of pieces of 16 bytes: eight rows begin in different banks.
    constexpr int R = SEVERAL_OWN, PIECES = (Q::BYTES + 15 + 4 + 15) / 16 | 1;
    constexpr int FOLDS = Q::FOLD ? Q::STEPS / Q::FOLD : 1, STEPS = Q::FOLD ? Q::FOLD : Q::STEPS;
    extern __shared__ __align__(16) u8 stages[];
    __shared__ float sums_of[WARPS][8 * TILES * R];
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, slice = warp % SPLIT, g = lane / 4, t = lane % 4;
    int first = (tile * (WARPS / SPLIT) + warp / SPLIT) * R, chunks = (k + Q::NUMBERS - 1) / Q::NUMBERS;
    u8 *own = stages + warp * (SEVERAL_STAGES * R * PIECES * 16);
    const u8 *w = reinterpret_cast<const u8 *>(matrix);
    auto line = [&](int r) { return w + (first + r < n ? first + r : n - 1) * far; };
    // Two lanes bring the pieces of a row by turns.
    u64 begin = u64(line(lane / 2) + Q::HEAD) + 16 * (lane % 2);
    int left = left_from(begin, past);
    auto bring = [&](int stage, int chunk) {
        u8 *to = own + ((stage * R + lane / 2) * PIECES + lane % 2) * 16;
        u64 from = begin + u32(chunk) * u32(Q::BYTES);
        int rest = left - chunk * Q::BYTES;
#pragma unroll
        for (int piece = 0; piece < PIECES; piece += 2) {
            if (piece + 1 == PIECES && lane % 2) break;
            bring_part(to + 16 * piece, from + 16 * piece, rest - 16 * piece, u64(w));
        }
    };
    u32 whole = 0x4b000000u | u32(n) >> 31;
    const float *rows[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) rows[i] = x(8 * i + g < m ? 8 * i + g : m - 1);
    const u8 *lines[2] = {line(g), line(g + 8)};
    float sums[TILES][4] = {};
    if (slice < chunks) bring(0, slice);
    copy_commit();
    int stage = 0;
    for (int chunk = slice; chunk < chunks; chunk += SPLIT) {
        copy_wait<0>();
        // Copies of all lanes are there, and all have read what is overwritten now.
        __syncwarp();
        if (chunk + SPLIT < chunks) bring(stage ^ 1, chunk + SPLIT);
        copy_commit();
        int at[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            at[r] = (stage * R + 8 * r + g) * PIECES * 16 + int(u64(lines[r] + Q::HEAD + i64(chunk) * Q::BYTES) & 15);
        int groups = (k - chunk * Q::NUMBERS + Q::GROUP - 1) / Q::GROUP;
        groups = groups < Q::NUMBERS / Q::GROUP ? groups : Q::NUMBERS / Q::GROUP;
        for (int group = 0; group < groups; ++group) {
            Q quarters[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) quarters[r].take(own, at[r], group, t);
#pragma unroll
            for (int fold = 0; fold < FOLDS; ++fold) {
                float products[TILES][4] = {}, totals[TILES][4] = {};
#pragma unroll
                for (int s = 0; s < STEPS; ++s) {
                    int step = fold * STEPS + s, place = chunk * Q::NUMBERS + Q::place(group, t, step);
                    bool inside = !Q::TAIL || place < k;
                    u32 a[4], less[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        a[i] = inside ? quarters[i % 2].pair(step, i / 2, whole) : 0;
                        less[i] = Q::LESS && inside ? quarters[i % 2].less(step, i / 2) : 0;
                    }
#pragma unroll
                    for (int i = 0; i < TILES; ++i) {
                        Floats<4> four = {};
                        if (inside) four = load<4>(rows[i] + place);
                        u32 b[PARTS][2];
                        parts_of(b, four);
#pragma unroll
                        for (int part = 0; part < PARTS; ++part) {
                            if (Q::LESS && PARTS > 1) multiply_matrices(products[i], less, b[part][0], b[part][1]);
                            multiply_matrices(products[i], a, b[part][0], b[part][1]);
                            u32 ones[4] = {ONES, ONES, ONES, ONES};
                            if (Q::OFFSET) multiply_matrices(totals[i], ones, b[part][0], b[part][1]);
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < TILES; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const Q &quarter = quarters[e / 2];
                        sums[i][e] = Q::FOLD ? fmaf(quarter.factor(fold), products[i][e], sums[i][e]) : sums[i][e] + products[i][e];
                        if (Q::OFFSET) sums[i][e] = fmaf(quarter.offset(fold), totals[i][e], sums[i][e]);
                    }
            }
        }
        stage ^= 1;
    }
    float heads[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) heads[r] = Q::last(Q::HEAD ? float_at(lines[r]) : 0.0f);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_of[warp][(8 * i + 2 * t + e % 2) * R + g + 8 * (e / 2)] = sums[i][e] * heads[e / 2];
    join_slices<8 * TILES * R, SPLIT>(sums_of, [&](int at, float sum) {
        int i = at / R, j = first + at % R;
        if (i < m && j < n) put(i, j, sum);
    });
}

// `m` rows by rows of a packed matrix, at most `M`: one by itself, several on tensor cores. Results
// are `C`.
template <class F, int M, int SPLIT, class C, class Row, class Put>
DEVICE void rows_of(Row x, int m, const F *matrix, const F *past, i64 far, int n, int k, int tile, Put put) {
    if constexpr (M == 1) {
        few<F, SPLIT>(x(0), matrix, past, far, n, k, tile, [&](int j, float sum) { put(0, j, sum); });
    } else {
        constexpr int PARTS = sizeof(C) == 2 ? 1 : 3;
        several<F, (M + 7) / 8, SPLIT, PARTS>(x, m, matrix, past, far, n, k, tile, put);
    }
}

// Whether somebody needs one of the rows. Blocks without one read no matrix; among others a row
// that is left out is read and multiplied, and not written: the bytes of the matrix, which bound
// the kernel, are the same with it.
template <bool SOME> DEVICE bool needed(const int *places, int rows) {
    bool any = !SOME;
    for (int i = 0; SOME && i < rows; ++i) any |= places[i] >= 0;
    return any;
}

// A product: lines of `a` and of `b` are `a_far` and `b_far` numbers apart. Rows that nobody needs
// (`SOME`) are not written.
template <class F, int M, int SPLIT, bool ADD, bool SOME, class C>
DEVICE void few_product(const float *a, const F *b, C *c, int m, int n, int k, u32 a_far, u32 b_far,
                        const int *places = nullptr) {
    if (!needed<SOME>(places, m)) return;
    auto row = [&](int i) { return a + i64(i) * a_far; };
    auto put = [&](int i, int j, float sum) {
        if (SOME && places[i] < 0) return;
        C &to = c[i64(i) * n + j];
        store(to, ADD ? to_float(to) + sum : sum);
    };
    const F *end = b + (i64(n - 1) * b_far + k) / F::UNIT;
    rows_of<F, M, SPLIT, C>(row, m, b, end, i64(b_far / F::UNIT) * sizeof(F), n, k, int(blockIdx.x), put);
}

// The vectors of heads by rows `first` on of each head's matrix of `out` rows.
template <class F, int M, int SPLIT, bool SOME, class C>
DEVICE void few_by_head(const float *x, const F *w, C *y, int rows, int heads, int out, int from, int n, int k,
                        const int *places = nullptr) {
    if (!needed<SOME>(places, rows)) return;
    u32 block = blockIdx.x;
    int head = int(take(block, heads));
    auto row = [&](int i) { return x + (i64(i) * heads + head) * k; };
    auto put = [&](int i, int j, float sum) {
        if (SOME && places[i] < 0) return;
        store(y[(i64(i) * heads + head) * n + j], sum);
    };
    const F *matrix = w + (i64(head) * out + from) * (k / F::UNIT);
    const F *end = matrix + i64(n) * (k / F::UNIT);
    rows_of<F, M, SPLIT, C>(row, rows, matrix, end, i64(k / F::UNIT) * sizeof(F), n, k, int(block), put);
}
