// Attention over keys that many query heads share, on the tensor cores: rows of a block's tile are
// the heads of tokens that read one head of keys. A cache of latents has one for all heads.
//
// As in `flash.cuh`, but a row of a head may be longer than the registers of a warp: `SHARERS`
// warps have 16 rows together. Each computes the scores of some keys of a tile, which meet in
// shared memory as weights, and the sums of some columns. The heads of few tokens do not fill a
// GPU: keys are cut into parts with a softmax each, which `flash_join` joins in their order.
#pragma once
#include "flash.cuh"

// `GROUPS` times 16 rows; a block goes through `PART` keys, a multiple of `TILE`, and all blocks
// through all. `SAME`: values are the keys.
template <class S_, bool SAME_, int GROUPS_, int SHARERS_, int TILE_, int PART_> struct FlashParts {
    typedef S_ S;
    static constexpr bool SAME = SAME_;
    static constexpr int GROUPS = GROUPS_, SHARERS = SHARERS_, TILE = TILE_, PART = PART_;
    static constexpr int ROWS = 16 * GROUPS, THREADS = 32 * GROUPS * SHARERS, STAGES = 2;
    static constexpr int PARTS = (S::KEYS + PART - 1) / PART, BLOCKS = (S::QUERIES * S::GROUP + ROWS - 1) / ROWS;
    // Padded rows fall into different banks, those of weights, too.
    static constexpr int ROW = S::SIZE + 8, OWN = ROWS * ROW, PASSING = TILE * ROW, WEIGHTS = TILE + 8;
    // Keys of a warp's scores, and pieces of 16 columns of its sums; the last warp may have fewer.
    static constexpr int KEYS = TILE / SHARERS, PIECES = S::SIZE / 16, EACH = (PIECES + SHARERS - 1) / SHARERS;
    static_assert(S::SIZE % 32 == 0 && KEYS % 8 == 0 && TILE % 16 == 0 && PART % TILE == 0, "pieces of products");
    // Tokens that rows belong to.
    static constexpr int TOKENS = ROWS % S::GROUP == 0 ? ROWS / S::GROUP : (ROWS - 2) / S::GROUP + 2;

    // `COUNT` rows into shared memory, each from where `place` has it among elements from `from`
    // on; zeros for a negative place.
    template <int COUNT, class Place> static DEVICE void load(bf16 *to, const bf16 *from, Place place) {
        constexpr int ACROSS = S::SIZE / 8;
#pragma unroll 6
        for (int v = int(threadIdx.x); v < COUNT * ACROSS; v += THREADS) {
            int row = v / ACROSS, column = v % ACROSS * 8;
            i64 at = place(row);
            copy_async(to + row * ROW + column, from + (at < 0 ? 0 : at + column), at < 0 ? 0 : 16);
        }
    }

    // A warp's rows times its keys; even and odd steps apart, so that products need not wait for
    // one another.
    static DEVICE void multiply(float (&s)[KEYS / 8][4], const bf16 *own, const bf16 *tile) {
        int lane = int(threadIdx.x % 32);
        float odd[KEYS / 8][4];
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][e] = odd[j][e] = 0.0f;
#pragma unroll 3
        for (int d = 0; d < S::SIZE; d += 32) {
            u32 a[2][4];
            load_matrices(a[0], own + lane % 16 * ROW + d + lane / 16 * 8);
            load_matrices(a[1], own + lane % 16 * ROW + d + 16 + lane / 16 * 8);
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) {
                u32 b[4];
                load_matrices(b, tile + (j * 8 + lane % 8) * ROW + d + lane / 8 * 8);
                multiply_matrices(s[j], a[0], b[0], b[1]);
                multiply_matrices(odd[j], a[1], b[2], b[3]);
            }
        }
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][e] += odd[j][e];
    }

    // `sums += weights · tile`, of the columns that a warp has.
    static DEVICE void add(float (&sums)[EACH][2][4], const bf16 *weights, const bf16 *tile, int sharer) {
        int lane = int(threadIdx.x % 32);
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) {
            u32 a[4];
            load_matrices(a, weights + lane % 16 * WEIGHTS + k * 16 + lane / 16 * 8);
#pragma unroll
            for (int d = 0; d < EACH; ++d) {
                int piece = sharer * EACH + d;
                if (PIECES % SHARERS > 0 && piece >= PIECES) continue;
                u32 b[4];
                load_matrices_transposed(b, tile + (k * 16 + lane % 16) * ROW + piece * 16 + lane / 16 * 8);
                multiply_matrices(sums[d][0], a, b[0], b[1]);
                multiply_matrices(sums[d][1], a, b[2], b[3]);
            }
        }
    }
};

// Shared memory: rows of queries, tiles of keys, tiles of values unless these are the keys,
// weights, a number of each row and sharer. `sums` and `shares` take the parts where there are
// several.
template <class F>
DEVICE void flash_parts(const bf16 *q, i64 q_stride, const bf16 *k, i64 k_stride, const bf16 *v, i64 v_stride,
                        const int *query_positions, const int *key_positions, const int *segments, bf16 *o, float *lse,
                        float *sums, float *shares, float scale, float cap, typename F::S::Reads reads = {}) {
    typedef typename F::S S;
    constexpr int ROWS = F::ROWS, TILE = F::TILE, SHARERS = F::SHARERS, EACH = F::EACH;
    extern __shared__ __align__(16) bf16 memory[];
    bf16 *own = memory, *keys = own + F::OWN, *values = F::SAME ? keys : keys + F::STAGES * F::PASSING;
    bf16 *weights = values + F::STAGES * F::PASSING;
    float *numbers = (float *)(weights + ROWS * F::WEIGHTS);
    u32 block = blockIdx.x;
    int part = int(take(block, F::PARTS));
    // The last queries of a causal sequence see most: they come first.
    int first = (F::BLOCKS - 1 - int(take(block, F::BLOCKS))) * ROWS;
    int kv_head = int(take(block, S::KV_HEADS)), sequence = int(block);
    int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), group = warp % F::GROUPS, sharer = warp / F::GROUPS;
    Mask<S> mask(query_positions, key_positions, segments, sequence, kv_head * S::GROUP, reads);
    i64 query_row = i64(sequence) * S::QUERIES, key_row = i64(sequence) * S::KEYS;
    k += key_row * k_stride + kv_head * S::SIZE, v += key_row * v_stride + kv_head * S::SIZE;

    int token = first / S::GROUP, begin, end;
    Mask<S>::template keys<F::TOKENS>(token, begin, end);
    begin = begin / TILE * TILE > part * F::PART ? begin / TILE * TILE : part * F::PART;
    end = (part + 1) * F::PART < end ? (part + 1) * F::PART : end;
    auto span = mask.template span<F::TOKENS>(token);
    auto next = [&](int key) { return mask.template next<TILE>(span, key, end); };
    auto load = [&](int buffer, int key) {
        F::template load<TILE>(keys + buffer * F::PASSING, k,
                               [&](int row) { return key + row < S::KEYS ? (key + row) * k_stride : i64(-1); });
        if (!F::SAME)
            F::template load<TILE>(values + buffer * F::PASSING, v,
                                   [&](int row) { return key + row < S::KEYS ? (key + row) * v_stride : i64(-1); });
    };
    int key = next(begin);
    if (key < end) {
        F::template load<ROWS>(own, q, [&](int row) {
            int query = (first + row) / S::GROUP, head = kv_head * S::GROUP + (first + row) % S::GROUP;
            return query < S::QUERIES ? (query_row + query) * q_stride + head * S::SIZE : i64(-1);
        });
        load(0, key);
    }
    copy_commit();

    float result[EACH][2][4], most[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int d = 0; d < EACH; ++d)
#pragma unroll
        for (int e = 0; e < 8; ++e) result[d][e / 4][e % 4] = 0.0f;
    const float unit = PLAIN<S> ? scale * LOG2_E : 1.0f;
    const int row = group * 16 + lane / 4;
    int buffer = 0;
    for (int after; key < end; key = after) {
        after = next(key + TILE);
        copy_wait<0>();
        // The tile is there, and nobody reads the other one any more.
        __syncthreads();
        if (after < end) load(1 - buffer, after);
        copy_commit();
        float p[F::KEYS / 8][4];
        F::multiply(p, own + group * 16 * F::ROW, keys + buffer * F::PASSING + sharer * F::KEYS * F::ROW);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int at = first + row + 8 * half, query = at / S::GROUP;
            mask.head = kv_head * S::GROUP + at % S::GROUP;
            float high = -infinity();
#pragma unroll
            for (int j = 0; j < F::KEYS / 8; ++j)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    int column = key + sharer * F::KEYS + column_of(j, e);
                    float x = S::CAPPED ? tanhf(p[j][e] * scale / cap) * (cap * LOG2_E) : p[j][e];
                    if (S::Program::SCORES) x = mask.score(p[j][e] * scale, query, column) * LOG2_E;
                    p[j][e] = mask.sees(query, column) ? x : -infinity();
                    high = fmaxf(high, p[j][e]);
                }
            high = lanes<Highest, 4>(high, ALL_LANES);
            if (lane % 4 == 0) numbers[sharer * ROWS + row + 8 * half] = high;
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float high = most[half];
#pragma unroll
            for (int w = 0; w < SHARERS; ++w) high = fmaxf(high, numbers[w * ROWS + row + 8 * half]);
            // Where nothing has been seen yet all are -inf, and so are their differences from 0.
            float from = high > -infinity() ? high * unit : 0.0f;
            float shrink = power_of_two(fmaf(most[half], unit, -from)), added = 0.0f;
#pragma unroll
            for (int j = 0; j < F::KEYS / 8; ++j) {
                float low = power_of_two(fmaf(p[j][2 * half], unit, -from));
                float upper = power_of_two(fmaf(p[j][2 * half + 1], unit, -from));
                added += low + upper;
                bf16 *place = weights + (row + 8 * half) * F::WEIGHTS + sharer * F::KEYS + column_of(j, 0);
                *(u32 *)place = pack(low, upper);
            }
            sum[half] = fmaf(sum[half], shrink, lanes<Sum, 4>(added, ALL_LANES));
            most[half] = high;
#pragma unroll
            for (int d = 0; d < EACH; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) result[d][e / 2][2 * half + e % 2] *= shrink;
        }
        __syncthreads();
        F::add(result, weights + group * 16 * F::WEIGHTS, values + buffer * F::PASSING, sharer);
        buffer = 1 - buffer;
    }
    copy_wait<0>();
    // Each warp has the sum of the weights of its keys.
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (lane % 4 == 0) numbers[sharer * ROWS + row + 8 * half] = sum[half];
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int at = first + row + 8 * half, query = at / S::GROUP;
        if (query >= S::QUERIES) continue;
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < SHARERS; ++w) total += numbers[w * ROWS + row + 8 * half];
        // A query that saw nothing is zero.
        bool none = total == 0.0f, own_number = sharer == 0 && lane % 4 == 0;
        i64 of = (query_row + query) * S::HEADS + kv_head * S::GROUP + at % S::GROUP;
        float factor = none ? 0.0f : 1.0f / total;
        if (F::PARTS > 1) {
            of += part * (i64(S::BATCH) * S::QUERIES * S::HEADS);
            if (own_number) store_pair(shares + 2 * of, none ? -infinity() : most[half] * unit, total);
            if (none) continue;
        } else if (own_number) {
            lse[of] = none ? -infinity() : (most[half] * unit + log2f(total)) * LN_2;
        }
#pragma unroll
        for (int d = 0; d < EACH; ++d)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                int piece = sharer * EACH + d;
                if (F::PIECES % SHARERS > 0 && piece >= F::PIECES) continue;
                i64 place = of * S::SIZE + piece * 16 + column_of(side, 0);
                float low = result[d][side][2 * half], high = result[d][side][2 * half + 1];
                if (F::PARTS > 1) store_pair(sums + place, low, high);
                else store_pair(o + place, low * factor, high * factor);
            }
    }
}

// The parts of a row of a head joined: a block has 32 columns, its warps take the parts in turns. A
// part that saw nothing has no sums.
template <class S, int PARTS> DEVICE void flash_join(const float *sums, const float *shares, bf16 *o, float *lse) {
    constexpr int WARPS = 8, SLICES = S::SIZE / 32;
    constexpr i64 ROWS = i64(S::BATCH) * S::QUERIES * S::HEADS;
    __shared__ float of_warps[WARPS][32];
    u32 block = blockIdx.x;
    int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), column = int(take(block, SLICES)) * 32 + lane;
    i64 row = block;
    float high = -infinity(), total = 0.0f, sum = 0.0f;
    for (int part = lane; part < PARTS; part += 32) high = fmaxf(high, shares[2 * (part * ROWS + row)]);
    high = lanes<Highest, 32>(high, ALL_LANES);
    float from = high > -infinity() ? high : 0.0f;
    for (int part = lane; part < PARTS; part += 32) {
        TwoFloats share = load_pair(shares + 2 * (part * ROWS + row));
        total = fmaf(power_of_two(share.low - from), share.high, total);
    }
    total = lanes<Sum, 32>(total, ALL_LANES);
#pragma unroll 4
    for (int part = warp; part < PARTS; part += WARPS) {
        i64 at = part * ROWS + row;
        float most = shares[2 * at];
        if (most > -infinity()) sum = fmaf(power_of_two(most - from), sums[at * S::SIZE + column], sum);
    }
    of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) sum += of_warps[w][lane];
    bool none = total == 0.0f;
    store(o[row * S::SIZE + column], none ? 0.0f : sum / total);
    if (column == 0) lse[row] = none ? -infinity() : (from + log2f(total)) * LN_2;
}
