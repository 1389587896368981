// Products of one row with packed matrices, as decoding has them: bound by the bytes of blocks.
//
// A warp has four adjacent rows of the matrix, and goes through a chunk of each at a time. Chunks
// pass through shared memory, several on their way: copies of 16 bytes are adjacent however long
// blocks are, and from there words are read at any byte. A lane makes numbers of its piece of a
// chunk in registers, runs of four, and multiplies by them in f32. Where the matrix has few rows
// several warps share them, every `SPLIT`th chunk is one's own.
#pragma once
#include "prelude.cuh"
#include "blocks.cuh"

constexpr int WARPS = 8;

// Words from any byte on of memory that begins at a word.
template <int N> DEVICE void words_at(u32 (&words)[N], const u8 *memory, int first) {
    const u32 *at = reinterpret_cast<const u32 *>(memory + (first & ~3));
    u32 shift = 8 * u32(first & 3), low = at[0];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        u32 high = at[i + 1];
        words[i] = __funnelshift_r(low, high, shift);
        low = high;
    }
}

DEVICE u32 byte_of(u32 word, int i) { return word >> (8 * i) & 255u; }

// The code of `BITS` bits at bit `at` of a word, less a bias. Below bit 23 it becomes the fraction
// of a float in place, which is faster than a conversion. `whole` is 2^23 in a register that is
// opaque to the compiler, so that the mask and the "or" are one instruction.
template <int BITS> DEVICE float code_at(u32 word, int at, float bias, u32 whole) {
    u32 shift = at + BITS <= 23 ? 0 : at + BITS - 16, mask = (1u << BITS) - 1;
    at -= int(shift);
    float one = float_of(u32(127 - at) << 23);
    return fmaf(float_of(masked(word >> shift, mask << at, whole)), one, -8388608.0f * one - bias);
}

// Four bits at bit `at` of a word as a number of E2M1, by 2^-14: those of a binary16.
DEVICE float e2m1_at(u32 word, int at) {
    u32 size = at > 9 ? word >> (at - 9) : word << (9 - at), sign = at > 12 ? word >> (at - 12) : word << (12 - at);
    return half_float((size & 0x0e00u) | (sign & 0x8000u));
}

// A lane's piece of a chunk: `RUNS` runs of four adjacent numbers `factor · code + offset`. Chunks
// have 128 numbers for each run, in `BYTES`; rows begin with `HEAD` bytes that no chunk has.
template <class F> struct Piece;

template <> struct Piece<F16> {
    static constexpr int HEAD = 0, BYTES = 1024, RUNS = 4;
    static constexpr bool OFFSET = false;
    u32 words[8];
    DEVICE void take(const u8 *memory, int chunk, int p, float) { words_at(words, memory, chunk + 32 * p); }
    static DEVICE int place(int p, int run) { return 16 * p + 4 * run; }
    DEVICE float code(int run, int i, u32) const { return half_float(words[2 * run + i / 2] >> (16 * (i % 2))); }
    DEVICE float factor(int) const { return 1.0f; }
    DEVICE float offset(int) const { return 0.0f; }
};

// Numbers of eight bits, 16 of them.
struct Eights {
    static constexpr int RUNS = 4;
    static constexpr bool OFFSET = false;
    u32 codes[4];
    float scale;
    static DEVICE int place(int p, int run) { return 16 * p + 4 * run; }
    DEVICE float code(int run, int i, u32 whole) const { return code_at<8>(codes[run] ^ 0x80808080u, 8 * i, 128.0f, whole); }
    DEVICE float factor(int) const { return scale; }
    DEVICE float offset(int) const { return 0.0f; }
};

template <int ROW> struct Piece<Int8<ROW>> : Eights {
    static constexpr int HEAD = 4, BYTES = 512;
    DEVICE void take(const u8 *memory, int chunk, int p, float head) {
        words_at(codes, memory, chunk + 16 * p);
        scale = head;
    }
};

template <> struct Piece<Q8> : Eights {
    static constexpr int HEAD = 0, BYTES = 544;
    DEVICE void take(const u8 *memory, int chunk, int p, float) {
        int block = chunk + 34 * (p / 2);
        scale = half_float(half_at(memory + block));
        words_at(codes, memory, block + 2 + 16 * (p % 2));
    }
};

// Numbers of four bits, eight bytes of them.
struct Fours {
    static constexpr int RUNS = 4;
    u32 codes[2];
    float scale;
    static DEVICE int bit(int run, int i) { return 8 * i + (run < 2 ? 0 : 4); }
    DEVICE float factor(int) const { return scale; }
};

template <> struct Piece<Q4> : Fours {
    static constexpr int HEAD = 0, BYTES = 288;
    static constexpr bool OFFSET = false;
    DEVICE void take(const u8 *memory, int chunk, int p, float) {
        int block = chunk + 18 * (p / 2);
        scale = half_float(half_at(memory + block));
        words_at(codes, memory, block + 2 + 8 * (p % 2));
    }
    static DEVICE int place(int p, int run) { return 32 * (p / 2) + 8 * (p % 2) + 4 * (run % 2) + 16 * (run / 2); }
    DEVICE float code(int run, int i, u32 whole) const { return code_at<4>(codes[run % 2], bit(run, i), 8.0f, whole); }
    DEVICE float offset(int) const { return 0.0f; }
};

template <> struct Piece<Mxfp4> : Fours {
    static constexpr int HEAD = 0, BYTES = 272;
    static constexpr bool OFFSET = false;
    DEVICE void take(const u8 *memory, int chunk, int p, float) {
        int block = chunk + 17 * (p / 2);
        scale = half_of_power(memory[block]) * 32768.0f;
        words_at(codes, memory, block + 1 + 8 * (p % 2));
    }
    static DEVICE int place(int p, int run) { return Piece<Q4>::place(p, run); }
    DEVICE float code(int run, int i, u32) const { return e2m1_at(codes[run % 2], bit(run, i)); }
    DEVICE float offset(int) const { return 0.0f; }
};

template <int ROW> struct Piece<Nvfp4<ROW>> : Fours {
    static constexpr int HEAD = 4, BYTES = 288;
    static constexpr bool OFFSET = false;
    DEVICE void take(const u8 *memory, int chunk, int p, float head) {
        int block = chunk + 36 * (p / 4);
        scale = e4m3(memory[block + p % 4]) * head * 16384.0f;
        words_at(codes, memory, block + 4 + 8 * (p % 4));
    }
    static DEVICE int place(int p, int run) { return 16 * p + 4 * run; }
    DEVICE float code(int run, int i, u32) const { return e2m1_at(codes[run % 2], bit(run, i)); }
    DEVICE float offset(int) const { return 0.0f; }
};

// Scales and offsets of two adjacent parts of a block of Q4_K, which have six bits each.
struct PartScales {
    float factors[2], offsets[2];
    DEVICE void take(const u8 *memory, int block, int pair) {
        int shift = 16 * (pair % 2);
        u32 head[4];
        words_at(head, memory, block);
        u32 scales = head[1] >> shift, less = head[2] >> shift, high = head[3] >> shift;
        bool later = pair >= 2;
        u32 s = later ? (high & 0x0f0fu) | (scales >> 2 & 0x3030u) : scales & 0x3f3fu;
        u32 m = later ? (high >> 4 & 0x0f0fu) | (less >> 2 & 0x3030u) : less & 0x3f3fu;
        float by = half_float(head[0]), down = -half_float(head[0] >> 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            factors[i] = by * float(byte_of(s, i));
            offsets[i] = down * float(byte_of(m, i));
        }
    }
};

template <> struct Piece<Q4K> {
    static constexpr int HEAD = 0, BYTES = 576, RUNS = 8;
    static constexpr bool OFFSET = true;
    u32 codes[4];
    PartScales scales;
    DEVICE void take(const u8 *memory, int chunk, int p, float) {
        int block = chunk + 144 * (p / 8), pair = p % 8 / 2;
        scales.take(memory, block, pair);
        words_at(codes, memory, block + 16 + 32 * pair + 16 * (p % 2));
    }
    static DEVICE int place(int p, int run) {
        return 256 * (p / 8) + 64 * (p % 8 / 2) + 16 * (p % 2) + 4 * (run % 4) + 32 * (run / 4);
    }
    DEVICE float code(int run, int i, u32 whole) const { return code_at<4>(codes[run % 4], 8 * i + (run < 4 ? 0 : 4), 0.0f, whole); }
    DEVICE float factor(int run) const { return scales.factors[run / 4]; }
    DEVICE float offset(int run) const { return scales.offsets[run / 4]; }
};

template <> struct Piece<Q6K> {
    static constexpr int HEAD = 0, BYTES = 420, RUNS = 4;
    static constexpr bool OFFSET = false;
    u32 codes[4];
    float factors[4];
    DEVICE void take(const u8 *memory, int chunk, int p, float) {
        int block = chunk + 210 * (p / 16), half = block + 64 * (p % 16 / 8);
        int first = 4 * (p % 8);
        u32 low[2][1], high[1];
        words_at(low[0], memory, half + first);
        words_at(low[1], memory, half + 32 + first);
        words_at(high, memory, block + 128 + 32 * (p % 16 / 8) + first);
        float by = half_float(half_at(memory + block + 208));
        const u8 *scales = memory + block + 192 + 8 * (p % 16 / 8) + first / 16;
#pragma unroll
        for (int run = 0; run < 4; ++run) {
            codes[run] = (low[run % 2][0] >> (run < 2 ? 0 : 4) & 0x0f0f0f0fu) | (high[0] >> (2 * run) & 0x03030303u) << 4;
            factors[run] = by * float((signed char)scales[2 * run]);
        }
    }
    static DEVICE int place(int p, int run) { return 256 * (p / 16) + 128 * (p % 16 / 8) + 4 * (p % 8) + 32 * run; }
    DEVICE float code(int run, int i, u32 whole) const { return code_at<6>(codes[run], 8 * i, 32.0f, whole); }
    DEVICE float factor(int run) const { return factors[run]; }
    DEVICE float offset(int) const { return 0.0f; }
};

// Chunks of each row that are in shared memory; `codegen/blocks.rs` has the numbers again.
constexpr int STAGES = 3;
// Rows of the matrix that a warp has.
constexpr int OWN = 4;

// Copies 16 bytes of a matrix from `begin` on, or only the `left` bytes that remain of the matrix;
// `inside` is an address of the matrix.
DEVICE void bring_part(u8 *to, u64 begin, int left, u64 inside) {
    int misplaced = int(begin & 15), bytes = left + misplaced;
    // An address is inside the matrix even where nothing is read.
    u64 from = bytes > 0 ? begin - misplaced : inside & ~15ull;
    bytes = bytes < 0 ? 0 : bytes < 16 ? bytes : 16;
    copy_async(to, reinterpret_cast<const u8 *>(from), bytes);
}

// Bytes from an address to the end of a matrix, as far as an int counts them.
DEVICE int left_from(u64 begin, const void *end) {
    i64 all = i64(u64(end) - begin);
    return all < 1 << 30 ? int(all) : 1 << 30;
}

// Adds what the `SPLIT` warps have that share rows of a matrix, `N` sums each, and hands each total
// to `put(number, sum)` once.
template <int N, int SPLIT, class Put> DEVICE void join_slices(float (&parts)[WARPS][N], Put put) {
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    if (SPLIT > 1) __syncthreads();
    else __syncwarp();
    if (warp % SPLIT != 0) return;
    for (int at = lane; at < N; at += 32) {
        float sum = parts[warp][at];
#pragma unroll
        for (int other = 1; other < SPLIT; ++other) sum += parts[warp + other][at];
        put(at, sum);
    }
}

// `Σ_k x[k] · w[j, k]` for the `n` rows of `w` from `matrix` on, `far` bytes apart; `past` is
// the end of the matrix. `tile` counts the tiles of columns. Each result goes to `put(j, sum)`
// once.
template <class F, int SPLIT, class Put>
DEVICE void few(const float *x, const F *matrix, const F *past, i64 far, int n, int k, int tile, Put put) {
    typedef Piece<F> P;
    constexpr int R = OWN, CHUNK = 128 * P::RUNS, PARTS = (P::BYTES + 15 + 4 + 15) / 16;
    extern __shared__ __align__(16) u8 stages[];
    __shared__ float parts[WARPS][R];
    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, slice = warp % SPLIT;
    int first = (tile * (WARPS / SPLIT) + warp / SPLIT) * R, chunks = (k + CHUNK - 1) / CHUNK;
    u8 *own = stages + warp * (STAGES * R * PARTS * 16);
    const u8 *w = reinterpret_cast<const u8 *>(matrix);
    auto line = [&](int r) { return w + (first + r < n ? first + r : n - 1) * far; };
    // A lane brings the same parts of every chunk: where they begin in the first, and what is left
    // of the matrix from there.
    constexpr int TIMES = (R * PARTS + 31) / 32;
    u64 begins[TIMES];
    int left[TIMES];
#pragma unroll
    for (int t = 0; t < TIMES; ++t) {
        int at = lane + 32 * t;
        begins[t] = u64(line(at / PARTS) + P::HEAD) + 16 * (at % PARTS);
        left[t] = left_from(begins[t], past);
    }
    auto bring = [&](int stage, int chunk) {
#pragma unroll
        for (int t = 0; t < TIMES; ++t) {
            int at = lane + 32 * t;
            if (R * PARTS % 32 != 0 && at >= R * PARTS) break;
            bring_part(own + (stage * R * PARTS + at) * 16, begins[t] + u32(chunk) * u32(P::BYTES),
                       left[t] - chunk * P::BYTES, u64(w));
        }
    };
    u32 whole = 0x4b000000u | u32(n) >> 31;
    float heads[R], sums[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        heads[r] = P::HEAD ? float_at(line(r)) : 0.0f;
        sums[r] = 0.0f;
    }
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (slice + stage * SPLIT < chunks) bring(stage, slice + stage * SPLIT);
        copy_commit();
    }
    int stage = 0;
    for (int chunk = slice; chunk < chunks; chunk += SPLIT) {
        copy_wait<STAGES - 2>();
        // Copies of all lanes are there, and all have read what is overwritten now.
        __syncwarp();
        int next = chunk + (STAGES - 1) * SPLIT;
        if (next < chunks) bring((stage + STAGES - 1) % STAGES, next);
        copy_commit();
        if (chunk * CHUNK + P::place(lane, 0) < k) {
            P pieces[R];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                int misplaced = int(u64(line(r) + P::HEAD + i64(chunk) * P::BYTES) & 15);
                pieces[r].take(own, (stage * R + r) * PARTS * 16 + misplaced, lane, heads[r]);
            }
#pragma unroll
            for (int run = 0; run < P::RUNS; ++run) {
                Floats<4> row = load<4>(x + chunk * CHUNK + P::place(lane, run));
                float total = P::OFFSET ? row.template all<Sum>() : 0.0f;
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    float sum = pieces[r].code(run, 0, whole) * row.x[0];
#pragma unroll
                    for (int q = 1; q < 4; ++q) sum = fmaf(pieces[r].code(run, q, whole), row.x[q], sum);
                    sums[r] = fmaf(pieces[r].factor(run), sum, sums[r]);
                    if (P::OFFSET) sums[r] = fmaf(pieces[r].offset(run), total, sums[r]);
                }
            }
        }
        stage = (stage + 1) % STAGES;
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
        float sum = lanes<Sum, 32>(sums[r], ALL_LANES);
        if (lane == 0) parts[warp][r] = sum;
    }
    join_slices<R, SPLIT>(parts, [&](int r, float sum) {
        if (first + r < n) put(first + r, sum);
    });
}

// Tiles of columns of `own` rows of a matrix a warp.
template <int SPLIT> DEVICE u32 tiles_of(int n, int own) {
    u32 columns = u32(WARPS / SPLIT * own);
    return (u32(n) + columns - 1) / columns;
}

// Slots by the matrices of their groups, each by itself; those in no group are zeroed.
template <class F, int SPLIT, bool GATHER, class C>
DEVICE void few_grouped(const float *x, const F *w, const int *offsets, const int *order, C *y, int slots, int experts,
                        int n, int k, u32 per, int *status, int launch) {
    u32 block = blockIdx.x;
    int tile = int(take(block, tiles_of<SPLIT>(n, OWN))), slot = int(block);
    // The first group that ends after the slot.
    int expert = 0, left = experts;
    while (left > 0) {
        int half = left / 2;
        if (offsets[expert + half + 1] <= slot) {
            expert += half + 1;
            left -= half + 1;
        } else {
            left = half;
        }
    }
    bool some = expert < experts;
    int source = GATHER && some ? order[slot] : slot;
    if (u32(source) >= u32(slots)) {
        report(status, launch);
        return;
    }
    auto put = [&](int j, float sum) { store(y[i64(slot) * n + j], some ? sum : 0.0f); };
    const float *row = x + i64(u32(source) / per) * k;
    const F *matrix = w + i64(some ? expert : 0) * n * (k / F::UNIT);
    few<F, SPLIT>(row, matrix, matrix + i64(n) * (k / F::UNIT), i64(k / F::UNIT) * sizeof(F), n, some ? k : 0, tile, put);
}

// All numbers of a packed matrix, eight a thread; of the last thread `tail`.
template <class F, class T> DEVICE void unpack(const F *from, T *to, int eights, int tail) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= eights) return;
    if (at == eights - 1 && tail < 8) {
        for (int i = 0; i < tail; ++i) store(to[8 * at + i], number(from, 8 * at + i));
        return;
    }
    Floats<8> values;
#pragma unroll
    for (int i = 0; i < 8; ++i) values.x[i] = number(from, 8 * at + i);
    store<8>(to + 8 * at, values);
}

// The same numbers in bf16.
DEVICE void narrow(const float *from, bf16 *to, int count) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < count) store(to[at], from[at]);
}
