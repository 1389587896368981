// Attention along the sequence on the tensor cores: bf16 operands, sums and softmax in f32.
//
// As in `attention.cuh`, with larger pieces: a block works for `ROWS` rows in shared memory, 16 in
// each warp; the rows of the other side pass through it `TILE` at a time, in `STAGES` buffers, so
// that the next ones are under way. A score goes from the fragment that a product gives straight
// into the fragment that the next one takes, rounded to bf16 on the way. The sums of a warp stay in
// its registers: `sums[j]` has columns `8 j ..`.
//
// The layout of rows in shared memory and the instruction that multiplies them are up to `F`:
// `FlashWarps` here, `FlashWarpgroups` on Hopper.
#pragma once
#include "attention.cuh"

// By warps, each for itself. Heads are multiples of 16 elements, of 128 at most. `WIDE`: rows can
// be copied eight elements at a time.
template <class S_, bool WIDE_> struct FlashWarps {
    typedef S_ S;
    static constexpr bool WIDE = WIDE_;
    static constexpr int ROWS = 64, TILE = 32, STAGES = 2, THREADS = 128, PIECES = S::SIZE / 8;
    static_assert(S::SIZE % 16 == 0 && S::SIZE <= 128, "heads of a warp's registers");
    // Rows are padded by 16 bytes, so that the eight rows of a matrix of `ldmatrix` fall into
    // different banks.
    static constexpr int ROW = S::SIZE + 8, OWN = ROWS * ROW, PASSING = TILE * ROW;

    // The first column of the sums that a thread has.
    static DEVICE int first_column() { return 0; }

    typedef bf16 *Place;
    struct Shared {};
    static DEVICE Place memory() {
        extern __shared__ __align__(16) bf16 rows[];
        return rows;
    }

    // A head's rows of a sequence.
    struct Rows {
        const bf16 *from;
        i64 stride;
        int count;
    };
    static DEVICE Rows rows(const bf16 *from, i64 stride, int sequence, int count, int column) {
        return {from + i64(sequence) * count * stride + column, stride, count};
    }

    // `COUNT` rows into shared memory; zeros beyond the last row.
    template <int COUNT> static DEVICE void load(Place to, Rows rows, int first, int) {
        constexpr int ACROSS = S::SIZE / 8;
#pragma unroll
        for (int v = int(threadIdx.x); v < COUNT * ACROSS; v += THREADS) {
            int row = v / ACROSS, column = v % ACROSS * 8;
            bool valid = first + row < rows.count;
            const bf16 *source = rows.from + (valid ? i64(first + row) * rows.stride + column : 0);
            bf16 *place = to + row * ROW + column;
            if (WIDE) {
                copy_async(place, source, valid ? 16 : 0);
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    bf16 zero = {0};
                    place[e] = valid ? source[e] : zero;
                }
            }
        }
    }

    // Numbers `0..TILE` among the threads that load.
    template <class Each> static DEVICE void share(Each each) {
        static_assert(TILE <= THREADS, "a thread for each");
        if (int(threadIdx.x) < TILE) each(int(threadIdx.x));
    }

    // Whether this thread loads for others, and has done so.
    struct Flow {
        DEVICE explicit Flow(Shared &) {}
    };
    template <class Next, class Own, class Load>
    static DEVICE bool bring(Flow &, int, int, Next, Own, Load) { return false; }

    // `own` once, then for every tile from `at` to `end`, by `next`: `load`, the products of
    // `first`, what `between` makes of them, and the products of `last`. The next tile is loaded
    // while one is used.
    template <bool AHEAD, class Next, class Own, class Load, class First, class Between, class Last>
    static DEVICE void pass(Flow &, int at, int end, Next next, Own own, Load load, First first, Between between, Last last) {
        auto stage = [&](int buffer, int at) {
            if (at < end) load(buffer, at, 0);
            copy_commit();
        };
        own(0);
        stage(0, at);
        int buffer = 0;
        for (int after; at < end; at = after) {
            after = next(at);
            stage(1 - buffer, after);
            copy_wait<1>();
            __syncthreads();
            first(buffer, at);
            between(buffer, at);
            last(buffer);
            __syncthreads();
            buffer = 1 - buffer;
        }
        copy_wait<0>();
    }

    // A warp's rows times the rows of the tile.
    static DEVICE void multiply(float (&s)[TILE / 8][4], const bf16 *own, const bf16 *tile) {
        int lane = int(threadIdx.x % 32);
        own += int(threadIdx.x / 32) * 16 * ROW;
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][e] = 0.0f;
#pragma unroll
        for (int d = 0; d < S::SIZE; d += 16) {
            u32 a[4];
            load_matrices(a, own + lane % 16 * ROW + d + lane / 16 * 8);
#pragma unroll
            for (int j = 0; j < TILE / 16; ++j) {
                u32 b[4];
                load_matrices(b, tile + (j * 16 + lane / 16 * 8 + lane % 8) * ROW + d + lane / 8 % 2 * 8);
                multiply_matrices(s[2 * j], a, b[0], b[1]);
                multiply_matrices(s[2 * j + 1], a, b[2], b[3]);
            }
        }
    }

    // `sums += weights · tile`, the weights as `multiply` gives them.
    static DEVICE void add(float (&sums)[PIECES][4], const float (&weights)[TILE / 8][4], const bf16 *tile) {
        int lane = int(threadIdx.x % 32);
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) {
            u32 a[4];
            fragment(a, weights[2 * k], weights[2 * k + 1]);
#pragma unroll
            for (int d = 0; d < PIECES; d += 2) {
                u32 b[4];
                load_matrices_transposed(b, tile + (k * 16 + lane % 16) * ROW + d * 8 + lane / 16 * 8);
                multiply_matrices(sums[d], a, b[0], b[1]);
                multiply_matrices(sums[d + 1], a, b[2], b[3]);
            }
        }
    }
};

template <class F> DEVICE void clear_rows(float (&sums)[F::PIECES][4]) {
#pragma unroll
    for (int d = 0; d < F::PIECES; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[d][e] = 0.0f;
}

// The row of the block and the column of the tile of element `e` of piece `j`.
template <class F> DEVICE int row_of(int e) {
    return int(threadIdx.x) / 32 % (F::ROWS / 16) * 16 + int(threadIdx.x) % 32 / 4 + e / 2 * 8;
}
DEVICE int column_of(int j, int e) { return j * 8 + int(threadIdx.x) % 4 * 2 + e % 2; }

// Rows of a head, each sum times `factor`.
template <class F>
DEVICE void store_head(const float (&sums)[F::PIECES][4], float factor, bf16 *to, i64 stride, int first, int rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = first + row_of<F>(2 * half);
        if (row >= rows) continue;
#pragma unroll
        for (int d = 0; d < F::PIECES; ++d) {
            bf16 *place = to + i64(row) * stride + F::first_column() + column_of(d, 0);
            float low = sums[d][2 * half] * factor, high = sums[d][2 * half + 1] * factor;
            if (F::WIDE) {
                *(u32 *)place = pack(low, high);
            } else {
                store(place[0], low);
                store(place[1], high);
            }
        }
    }
}

// As `Largest`, in one instruction.
struct Highest {
    static DEVICE float join(float a, float b) { return fmaxf(a, b); }
};

// Whether scores are products times a number, which the exponent multiplies by.
template <class S> constexpr bool PLAIN = !S::CAPPED && !S::Program::SCORES;

// The bits of a query's list for the 32 keys that `key` is one of.
template <class S> DEVICE u32 listed(const Mask<S> &mask, int query, int key) {
    if constexpr (LISTED<typename S::Program>)
        return S::Program::word(mask.reads, mask.sequence, mask.head, query, key);
    return 0xffffffffu;
}

// Which keys of a tile the rows of a thread have in their lists. The first of them, `key`, is a
// multiple of 32.
template <class F> struct Lists {
    static constexpr bool THERE = LISTED<typename F::S::Program>;
    u32 of[2][THERE ? F::TILE / 32 : 1];

    DEVICE Lists(const Mask<typename F::S> &mask, int first, int key) {
#pragma unroll
        for (int half = 0; THERE && half < 2; ++half)
#pragma unroll
            for (int w = 0; w < F::TILE / 32; ++w)
                of[half][w] = listed(mask, first + row_of<F>(2 * half), key + 32 * w) >> column_of(0, 0);
    }
    // Element `e` of piece `j`.
    DEVICE bool have(int j, int e) const { return !THERE || (of[e / 2][j / 4] >> (j % 4 * 8 + e % 2) & 1u); }
};

// Products as scores in base 2, or as they are where scores are `PLAIN`; what is not seen is -inf.
// `ALL`: all of them are seen.
template <class F, bool ALL>
DEVICE void to_scores(float (&p)[F::TILE / 8][4], const Mask<typename F::S> &mask, int first, int key, float scale,
                      float cap) {
    typedef typename F::S S;
    float factor = cap * LOG2_E;
    Lists<F> lists(mask, first, key);
#pragma unroll
    for (int j = 0; j < F::TILE / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int query = first + row_of<F>(e), column = key + column_of(j, e);
            float x = S::CAPPED ? tanhf(p[j][e] * scale / cap) * factor : p[j][e];
            if (S::Program::SCORES) x = mask.score(p[j][e] * scale, query, column) * LOG2_E;
            p[j][e] = ALL || (lists.have(j, e) && mask.template sees<false>(query, column)) ? x : -infinity();
        }
}

// The logarithm of a denominator in base 2, to be added to exponents; finite where nothing is seen.
DEVICE float negative_log(float lse) { return fminf(-lse * LOG2_E, 3.402823e38f); }

// The weight of a pair and the cotangent of its product but for the scale, both without a branch:
// what is not seen has an exponent of -inf. `log`: of the query, by `negative_log`.
template <class S>
DEVICE void pair_grad_of(const Mask<S> &mask, int query, int key, bool seen, float product, float dp, float log,
                         float along, float scale, float cap, float &p, float &ds) {
    float t = S::CAPPED ? tanhf(product * scale / cap) : product;
    float exponent = fmaf(t, (S::CAPPED ? cap : scale) * LOG2_E, log);
    if (S::Program::SCORES) exponent = fmaf(mask.score(product * scale, query, key), LOG2_E, log);
    p = power_of_two(seen ? exponent : -infinity());
    float by = S::Program::SCORES ? mask.slope(product * scale, query, key) : 1.0f;
    ds = p * (dp - along);
    if (S::CAPPED) ds *= 1.0f - t * t;
    if (S::Program::SCORES) ds = ds == 0.0f ? 0.0f : ds * by;
}

// Shared memory: the queries, tiles of keys, tiles of values. `X`: an address, or a tensor map of
// the copy engine.
template <class F, class X>
DEVICE void flash(const X &q, i64 q_stride, const X &k, i64 k_stride, const X &v, i64 v_stride,
                  const int *query_positions, const int *key_positions, const int *segments, bf16 *o, float *lse,
                  float scale, float cap, typename F::S::Reads reads = {}) {
    typedef typename F::S S;
    typedef typename F::Place Place;
    constexpr int ROWS = F::ROWS, TILE = F::TILE;
    __shared__ typename F::Shared shared;
    Place own = F::memory(), keys = own + F::OWN, values = keys + F::STAGES * F::PASSING;
    u32 block = blockIdx.x;
    // The last queries of a causal sequence see most: they come first.
    constexpr int BLOCKS = (S::QUERIES + ROWS - 1) / ROWS;
    int first = (BLOCKS - 1 - int(take(block, BLOCKS))) * ROWS;
    int head = int(take(block, S::HEADS)), sequence = int(block);
    Mask<S> mask(query_positions, key_positions, segments, sequence, head, reads);
    i64 query_row = i64(sequence) * S::QUERIES;
    auto my_q = F::rows(q, q_stride, sequence, S::QUERIES, head * S::SIZE);
    auto my_k = F::rows(k, k_stride, sequence, S::KEYS, head / S::GROUP * S::SIZE);
    auto my_v = F::rows(v, v_stride, sequence, S::KEYS, head / S::GROUP * S::SIZE);

    int begin, end;
    Mask<S>::template keys<ROWS>(first, begin, end);
    auto span = mask.template span<ROWS>(first);
    auto next = [&](int key) { return mask.template next<TILE>(span, key + TILE, end); };
    begin = mask.template next<TILE>(span, begin, end);
    auto load_own = [&](int arrival) { F::template load<ROWS>(own, my_q, first, arrival); };
    auto load = [&](int buffer, int key, int arrival) {
        F::template load<TILE>(keys + buffer * F::PASSING, my_k, key, arrival);
        F::template load<TILE>(values + buffer * F::PASSING, my_v, key, arrival);
    };
    typename F::Flow flow(shared);
    if (F::bring(flow, begin, end, next, load_own, load)) return;
    float result[F::PIECES][4], most[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
    clear_rows<F>(result);
    const float unit = PLAIN<S> ? scale * LOG2_E : 1.0f;
    float p[TILE / 8][4];
    auto scores = [&](int buffer, int) { F::multiply(p, own, keys + buffer * F::PASSING); };
    auto weights = [&](int, int key) {
        if (mask.template all<ROWS, TILE, TILE>(span, first, key, key)) to_scores<F, true>(p, mask, first, key, scale, cap);
        else to_scores<F, false>(p, mask, first, key, scale, cap);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float high = most[half];
#pragma unroll
            for (int j = 0; j < TILE / 8; ++j)
                high = fmaxf(high, fmaxf(p[j][2 * half], p[j][2 * half + 1]));
            // The four lanes of a row; all rows are joined at once.
            high = lanes<Highest, 4>(high, ALL_LANES);
            // Where nothing has been seen yet all are -inf, and so are their differences from 0.
            float from = high > -infinity() ? high * unit : 0.0f;
            float shrink = power_of_two(fmaf(most[half], unit, -from)), part = 0.0f;
#pragma unroll
            for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    p[j][e] = power_of_two(fmaf(p[j][e], unit, -from));
                    part += p[j][e];
                }
            sum[half] = fmaf(sum[half], shrink, lanes<Sum, 4>(part, ALL_LANES));
            most[half] = high;
#pragma unroll
            for (int d = 0; d < F::PIECES; ++d) {
                result[d][2 * half] *= shrink;
                result[d][2 * half + 1] *= shrink;
            }
        }
    };
    auto sums = [&](int buffer) { F::add(result, p, values + buffer * F::PASSING); };
    F::template pass<true>(flow, begin, end, next, load_own, load, scores, weights, sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // A query that saw nothing is zero.
        bool none = sum[half] == 0.0f;
        float factor = none ? 0.0f : 1.0f / sum[half];
#pragma unroll
        for (int d = 0; d < F::PIECES; ++d) {
            result[d][2 * half] *= factor;
            result[d][2 * half + 1] *= factor;
        }
        int query = first + row_of<F>(2 * half);
        if (threadIdx.x % 4 == 0 && query < S::QUERIES)
            lse[(query_row + query) * S::HEADS + head] = none ? -infinity() : (most[half] * unit + log2f(sum[half])) * LN_2;
    }
    constexpr i64 O_STRIDE = i64(S::HEADS) * S::SIZE;
    store_head<F>(result, 1.0f, o + query_row * O_STRIDE + head * S::SIZE, O_STRIDE, first, S::QUERIES);
}

// The cotangents of products of queries with a tile of keys, in place of the products.
template <class F, bool ALL>
DEVICE void query_grads(float (&s)[F::TILE / 8][4], const float (&dp)[F::TILE / 8][4], const Mask<typename F::S> &mask,
                        int first, int key, const float (&log)[2], const float (&along)[2], float scale, float cap) {
    Lists<F> lists(mask, first, key);
#pragma unroll
    for (int j = 0; j < F::TILE / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int query = first + row_of<F>(e), column = key + column_of(j, e);
            bool seen = ALL || (lists.have(j, e) && mask.template sees<false>(query, column));
            float p;
            pair_grad_of<typename F::S>(mask, query, column, seen, s[j][e], dp[j][e], log[e / 2], along[e / 2], scale, cap,
                                        p, s[j][e]);
        }
}

// The weights of a tile of queries for the keys, in place of the products, and the cotangents of
// products in place of those of weights.
template <class F, bool ALL>
DEVICE void key_grads(float (&s)[F::TILE / 8][4], float (&dp)[F::TILE / 8][4], const Mask<typename F::S> &mask, int query,
                      int first, const float (&lse)[F::TILE], const float (&along)[F::TILE], float scale, float cap) {
#pragma unroll
    for (int j = 0; j < F::TILE / 8; ++j)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            // Found anew for each piece: the sums need the registers.
            int column = ALL ? column_of(j, side) : anew(column_of(j, side));
            float my_log = negative_log(lse[column]), my_along = along[column];
            u32 list = ALL ? 0xffffffffu : listed(mask, query + column, first + row_of<F>(0));
#pragma unroll
            for (int e = side; e < 4; e += 2) {
                int key = first + row_of<F>(e);
                bool seen = ALL || ((list >> key % 32 & 1u) && mask.template sees<false>(query + column, key));
                pair_grad_of<typename F::S>(mask, query + column, key, seen, s[j][e], dp[j][e], my_log, my_along, scale,
                                            cap, s[j][e], dp[j][e]);
            }
        }
}

// Shared memory: the queries and their cotangents, tiles of keys, tiles of values.
template <class F, class X>
DEVICE void flash_grad_queries(const X &q, i64 q_stride, const X &k, i64 k_stride, const X &v, i64 v_stride,
                               const float *lse, const X &d, i64 d_stride, const int *query_positions,
                               const int *key_positions, const int *segments, bf16 *dq, i64 dq_stride,
                               const float *along, float scale, float cap, typename F::S::Reads reads = {}) {
    typedef typename F::S S;
    typedef typename F::Place Place;
    constexpr int ROWS = F::ROWS, TILE = F::TILE;
    __shared__ typename F::Shared shared;
    Place own = F::memory(), own_d = own + F::OWN, keys = own_d + F::OWN, values = keys + F::STAGES * F::PASSING;
    u32 block = blockIdx.x;
    constexpr int BLOCKS = (S::QUERIES + ROWS - 1) / ROWS;
    int first = (BLOCKS - 1 - int(take(block, BLOCKS))) * ROWS;
    int head = int(take(block, S::HEADS)), sequence = int(block);
    Mask<S> mask(query_positions, key_positions, segments, sequence, head, reads);
    i64 query_row = i64(sequence) * S::QUERIES;
    auto my_q = F::rows(q, q_stride, sequence, S::QUERIES, head * S::SIZE);
    auto my_d = F::rows(d, d_stride, sequence, S::QUERIES, head * S::SIZE);
    auto my_k = F::rows(k, k_stride, sequence, S::KEYS, head / S::GROUP * S::SIZE);
    auto my_v = F::rows(v, v_stride, sequence, S::KEYS, head / S::GROUP * S::SIZE);

    int begin, end;
    Mask<S>::template keys<ROWS>(first, begin, end);
    auto span = mask.template span<ROWS>(first);
    auto next = [&](int key) { return mask.template next<TILE>(span, key + TILE, end); };
    begin = mask.template next<TILE>(span, begin, end);
    auto load_own = [&](int arrival) {
        F::template load<ROWS>(own, my_q, first, arrival);
        F::template load<ROWS>(own_d, my_d, first, arrival);
    };
    auto load = [&](int buffer, int key, int arrival) {
        F::template load<TILE>(keys + buffer * F::PASSING, my_k, key, arrival);
        F::template load<TILE>(values + buffer * F::PASSING, my_v, key, arrival);
    };
    typename F::Flow flow(shared);
    if (F::bring(flow, begin, end, next, load_own, load)) return;
    float result[F::PIECES][4], my_log[2], my_along[2];
    clear_rows<F>(result);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int query = first + row_of<F>(2 * half);
        i64 at = (query_row + query) * S::HEADS + head;
        my_log[half] = negative_log(query < S::QUERIES ? lse[at] : -infinity());
        my_along[half] = query < S::QUERIES ? along[at] : 0.0f;
    }
    float s[TILE / 8][4], dp[TILE / 8][4];
    auto products = [&](int buffer, int) {
        F::multiply(s, own, keys + buffer * F::PASSING);
        F::multiply(dp, own_d, values + buffer * F::PASSING);
    };
    auto grads = [&](int, int key) {
        if (mask.template all<ROWS, TILE, TILE>(span, first, key, key))
            query_grads<F, true>(s, dp, mask, first, key, my_log, my_along, scale, cap);
        else query_grads<F, false>(s, dp, mask, first, key, my_log, my_along, scale, cap);
    };
    auto sums = [&](int buffer) { F::add(result, s, keys + buffer * F::PASSING); };
    F::template pass<S::SIZE <= 128>(flow, begin, end, next, load_own, load, products, grads, sums);
    store_head<F>(result, scale, dq + query_row * dq_stride + head * S::SIZE, dq_stride, first, S::QUERIES);
}

// Shared memory: the keys and values, tiles of queries, tiles of their cotangents.
template <class F, class X>
DEVICE void flash_grad_keys(const X &q, i64 q_stride, const X &k, i64 k_stride, const X &v, i64 v_stride,
                            const float *lse, const X &d, i64 d_stride, const int *query_positions,
                            const int *key_positions, const int *segments, bf16 *dk, i64 dk_stride, bf16 *dv,
                            i64 dv_stride, const float *along, float scale, float cap, typename F::S::Reads reads = {}) {
    typedef typename F::S S;
    typedef typename F::Place Place;
    constexpr int ROWS = F::ROWS, TILE = F::TILE;
    __shared__ typename F::Shared shared;
    Place own = F::memory(), own_v = own + F::OWN, queries = own_v + F::OWN;
    Place cotangents = queries + F::STAGES * F::PASSING;
    u32 block = blockIdx.x;
    int first = int(take(block, (S::KEYS + ROWS - 1) / ROWS)) * ROWS, kv_head = int(take(block, S::KV_HEADS));
    int sequence = int(block), kv = kv_head * S::SIZE;
    Mask<S> mask(query_positions, key_positions, segments, sequence, 0, reads);
    i64 query_row = i64(sequence) * S::QUERIES, key_row = i64(sequence) * S::KEYS;
    auto my_k = F::rows(k, k_stride, sequence, S::KEYS, kv), my_v = F::rows(v, v_stride, sequence, S::KEYS, kv);

    int begin, end;
    Mask<S>::template queries<ROWS>(first, begin, end);
    __shared__ float lse_of[F::STAGES][TILE], along_of[F::STAGES][TILE];
    // Tiles of queries, each of all heads that read these keys.
    int tiles = end > begin ? (end - begin + TILE - 1) / TILE * S::GROUP : 0;
    auto span = mask.template span<ROWS>(first);
    auto next = [&](int tile) {
        ++tile;
        // Tiles of other documents are passed over, for all heads of the group.
        if (Mask<S>::BY_SEGMENT && tile % S::GROUP == 0)
            while (tile < tiles && !mask.template near<TILE>(span, begin + tile / S::GROUP * TILE)) tile += S::GROUP;
        auto reads = [&](int tile) {
            int head = kv_head * S::GROUP + tile % S::GROUP;
            return mask.reads_some(head, begin + tile / S::GROUP * TILE, TILE, first, ROWS);
        };
        while (LISTED<typename S::Program> && tile < tiles && !reads(tile)) ++tile;
        return tile;
    };
    auto load_own = [&](int arrival) {
        F::template load<ROWS>(own, my_k, first, arrival);
        F::template load<ROWS>(own_v, my_v, first, arrival);
    };
    auto load = [&](int buffer, int tile, int arrival) {
        int query = begin + tile / S::GROUP * TILE, head = kv_head * S::GROUP + tile % S::GROUP;
        auto my_q = F::rows(q, q_stride, sequence, S::QUERIES, head * S::SIZE);
        auto my_d = F::rows(d, d_stride, sequence, S::QUERIES, head * S::SIZE);
        F::template load<TILE>(queries + buffer * F::PASSING, my_q, query, arrival);
        F::template load<TILE>(cotangents + buffer * F::PASSING, my_d, query, arrival);
        F::share([&](int i) {
            bool valid = query + i < S::QUERIES;
            i64 at = (query_row + (valid ? query + i : 0)) * S::HEADS + head;
            copy_async(&lse_of[buffer][i], lse + at, valid);
            copy_async(&along_of[buffer][i], along + at, valid);
        });
    };
    typename F::Flow flow(shared);
    if (F::bring(flow, 0, tiles, next, load_own, load)) return;
    float result_k[F::PIECES][4], result_v[F::PIECES][4];
    clear_rows<F>(result_k);
    clear_rows<F>(result_v);
    float s[TILE / 8][4], dp[TILE / 8][4];
    auto products = [&](int buffer, int) {
        F::multiply(s, own, queries + buffer * F::PASSING);
        F::multiply(dp, own_v, cotangents + buffer * F::PASSING);
    };
    auto grads = [&](int buffer, int tile) {
        int query = begin + tile / S::GROUP * TILE;
        mask.head = kv_head * S::GROUP + tile % S::GROUP;
        // Queries beyond the last have cotangents of zero.
        if (mask.template all<TILE, ROWS, TILE>(span, query, first, query))
            key_grads<F, true>(s, dp, mask, query, first, lse_of[buffer], along_of[buffer], scale, cap);
        else key_grads<F, false>(s, dp, mask, query, first, lse_of[buffer], along_of[buffer], scale, cap);
    };
    auto sums = [&](int buffer) {
        F::add(result_v, s, cotangents + buffer * F::PASSING);
        F::add(result_k, dp, queries + buffer * F::PASSING);
    };
    F::template pass<false>(flow, 0, tiles, next, load_own, load, products, grads, sums);
    store_head<F>(result_k, scale, dk + key_row * dk_stride + kv, dk_stride, first, S::KEYS);
    store_head<F>(result_v, 1.0f, dv + key_row * dv_stride + kv, dv_stride, first, S::KEYS);
}
