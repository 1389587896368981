// Attention along the sequence, flash style, in f32 on the ordinary cores.
//
// A warp works for `EACH` rows at a time. Forward and for the gradient of the queries these are
// queries, and the block goes through the keys `LANES` at a time; for the gradients of keys and
// values they are keys, and the block goes through the queries of all heads that read them. A tile
// of them is in shared memory. Scores are computed with a lane for each row of the tile, products
// with them with a lane for each element of a head, so neither needs a reduction across lanes but
// for the softmax. Nothing of size `queries · keys` exists, and every sum is owned by one warp: no
// atomics.
#pragma once
#include "prelude.cuh"

constexpr int LANES = 32;
// Rows of a warp, and warps of a block.
constexpr int EACH = 4, WARPS = 4;
constexpr int OWN = EACH * WARPS;

// Scores that are scaled products, and no mask besides. Others are generated, with the same
// members.
struct Plain {
    static constexpr bool SCORES = false, MASKS = false;
    struct Reads {};
    static DEVICE float score(float s, const Reads &, i64, i64, i64, i64, i64, i64) { return s; }
    static DEVICE float slope(float, const Reads &, i64, i64, i64, i64, i64, i64) { return 1.0f; }
    static DEVICE float sees(float, const Reads &, i64, i64, i64, i64, i64, i64) { return 1.0f; }
};

// Keys at the ends of blocks of `EVERY`, and no others.
template <int EVERY> struct Ends {
    static constexpr bool SCORES = false, MASKS = true;
    struct Reads {};
    static DEVICE float score(float s, const Reads &, i64, i64, i64, i64, i64, i64) { return s; }
    static DEVICE float slope(float, const Reads &, i64, i64, i64, i64, i64, i64) { return 1.0f; }
    static DEVICE float sees(float, const Reads &, i64, i64, i64, i64, i64, i64 key) {
        return (key + 1) % EVERY == 0 ? 1.0f : 0.0f;
    }
};

// Keys that lists choose, those of as many adjacent heads one list; `attention_bits` makes of each
// a bit for every key, and `attention_tiles` a bit for 32 queries and 32 keys that some of them
// read.
template <int QUERIES, int KEYS, int HEADS, int LISTS> struct Listed {
    static constexpr bool SCORES = false, MASKS = true;
    static constexpr int WORDS = (KEYS + 31) / 32, TILES = (QUERIES + 31) / 32, TILE_WORDS = (WORDS + 31) / 32;
    struct Reads {
        const u32 *bits, *tiles;
    };
    static DEVICE float score(float s, const Reads &, i64, i64, i64, i64, i64, i64) { return s; }
    static DEVICE float slope(float, const Reads &, i64, i64, i64, i64, i64, i64) { return 1.0f; }
    static DEVICE float sees(float, const Reads &reads, i64 b, i64 i, i64 j, i64 h, i64, i64) {
        return word(reads, int(b), int(h), int(i), int(j)) >> (j % 32) & 1u ? 1.0f : 0.0f;
    }

    static DEVICE i64 list(int sequence, int head) { return i64(sequence) * LISTS + head / (HEADS / LISTS); }
    // The bits of the 32 keys that `key` is one of; rows beyond the last are those of the last.
    static DEVICE u32 word(const Reads &reads, int sequence, int head, int query, int key) {
        int row = query < QUERIES ? query : QUERIES - 1, at = key / 32 < WORDS ? key / 32 : WORDS - 1;
        return reads.bits[(list(sequence, head) * QUERIES + row) * WORDS + at];
    }
    // Whether some of `queries` queries read some of `keys` keys.
    static DEVICE bool some(const Reads &reads, int sequence, int head, int query, int queries, int key, int keys) {
        bool some = false;
        for (int tile = query / 32; tile < TILES && tile * 32 < query + queries; ++tile)
            for (int word = key / 32; word < WORDS && word * 32 < key + keys; ++word)
                some |= reads.tiles[(list(sequence, head) * TILES + tile) * TILE_WORDS + word / 32] >> word % 32 & 1u;
        return some;
    }
};
template <class Program> constexpr bool LISTED = false;
template <int QUERIES, int KEYS, int HEADS, int LISTS>
constexpr bool LISTED<Listed<QUERIES, KEYS, HEADS, LISTS>> = true;

// Everything about an attention that is known when it is compiled.
template <int BATCH_, int QUERIES_, int KEYS_, int HEADS_, int KV_HEADS_, int SIZE_, bool POSITIONS_, bool SEGMENTS_,
          int WINDOW_, bool CAPPED_, class Program_ = Plain>
struct Shape {
    typedef Program_ Program;
    typedef typename Program::Reads Reads;
    static constexpr int BATCH = BATCH_, QUERIES = QUERIES_, KEYS = KEYS_, HEADS = HEADS_, KV_HEADS = KV_HEADS_;
    static constexpr int SIZE = SIZE_, GROUP = HEADS / KV_HEADS;
    // Elements of a head for each lane, and a row of a tile: padded with zeros, and odd, so that
    // lanes that read a column meet different banks.
    static constexpr int PER_LANE = (SIZE + 31) / 32, ROW = PER_LANE * 32 + 1;
    static constexpr bool POSITIONS = POSITIONS_, SEGMENTS = SEGMENTS_, CAPPED = CAPPED_;
    // 0 for none.
    static constexpr int WINDOW = WINDOW_;
    static constexpr int QUERY_BLOCKS = (QUERIES + OWN - 1) / OWN, KEY_BLOCKS = (KEYS + OWN - 1) / OWN;
};

// Which keys a query of one sequence sees.
template <class S> struct Mask {
    const int *query_positions, *key_positions, *segments;
    int sequence, head;
    typename S::Reads reads;

    DEVICE Mask(const int *q, const int *k, const int *s, int sequence, int head = 0, typename S::Reads reads = {})
        : query_positions(S::POSITIONS ? q + i64(sequence) * S::QUERIES : nullptr),
          key_positions(S::POSITIONS ? k + i64(sequence) * S::KEYS : nullptr),
          segments(S::SEGMENTS ? s + i64(sequence) * S::QUERIES : nullptr), sequence(sequence), head(head),
          reads(reads) {}

    // The score of a pair from its scaled product.
    DEVICE float score(float s, int query, int key) const {
        int q = query < S::QUERIES ? query : S::QUERIES - 1, k = key < S::KEYS ? key : S::KEYS - 1;
        return S::Program::score(s, reads, sequence, q, k, head, S::POSITIONS ? query_positions[q] : q,
                                 S::POSITIONS ? key_positions[k] : k);
    }

    // Without a branch: what is read of rows beyond the last is that of the last. `LISTS`: lists
    // are looked at, too.
    template <bool LISTS = true> DEVICE bool sees(int query, int key) const {
        bool seen = (query < S::QUERIES) & (key < S::KEYS);
        int q = query < S::QUERIES ? query : S::QUERIES - 1, k = key < S::KEYS ? key : S::KEYS - 1;
        if (S::SEGMENTS) seen &= segments[q] == segments[k];
        if (S::Program::MASKS && (LISTS || !LISTED<typename S::Program>))
            seen &= S::Program::sees(0.0f, reads, sequence, q, k, head, S::POSITIONS ? query_positions[q] : q,
                                     S::POSITIONS ? key_positions[k] : k) > 0.0f;
        if (!S::POSITIONS) return seen & (key <= query) & (S::WINDOW == 0 || query - key < S::WINDOW);
        q = query_positions[q], k = key_positions[k];
        return seen & (k >= 0) & (k <= q) & (S::WINDOW == 0 || i64(q) - k < S::WINDOW);
    }

    // The derivative of that.
    DEVICE float slope(float s, int query, int key) const {
        int q = query < S::QUERIES ? query : S::QUERIES - 1, k = key < S::KEYS ? key : S::KEYS - 1;
        return S::Program::slope(s, reads, sequence, q, k, head, S::POSITIONS ? query_positions[q] : q,
                                 S::POSITIONS ? key_positions[k] : k);
    }

    // Where rows `first..first + COUNT` stand: positions of queries (those before all keys see
    // nothing), else the segments of queries or of keys. `low > high` where there are none.
    struct Span {
        int low, high;
        // The rows, where they are queries.
        int first, count;
    };
    static constexpr bool BY_SEGMENT = S::SEGMENTS && !S::POSITIONS;
    template <int COUNT = OWN> DEVICE Span span(int first) const {
        Span span = {0x7fffffff, S::POSITIONS ? -1 : int(0x80000000u), first, COUNT};
        if (!S::POSITIONS && !S::SEGMENTS) return span;
        const int *places = S::POSITIONS ? query_positions : segments;
        for (int i = int(threadIdx.x % 32); i < COUNT && first + i < S::QUERIES; i += 32) {
            int at = places[first + i];
            if ((at >= 0 || BY_SEGMENT) && at < span.low) span.low = at;
            if (at > span.high) span.high = at;
        }
        span.low = __reduce_min_sync(ALL_LANES, span.low);
        span.high = __reduce_max_sync(ALL_LANES, span.high);
        return span;
    }

    // Whether `TILE` rows from `first` on have any of these segments. All lanes of a warp call it.
    template <int TILE> DEVICE bool near(Span span, int first) const {
        bool some = false;
#pragma unroll
        for (int i = int(threadIdx.x % 32); i < TILE; i += 32) {
            int of = first + i < S::KEYS ? segments[first + i] : span.low;
            some |= of >= span.low && of <= span.high;
        }
        return __any_sync(ALL_LANES, some);
    }

    // Whether `COUNT` queries from `first` on see all of `TILE` keys from `key` on; false where
    // that takes a look at each. Queries beyond the last do not matter. `span` is that of the rows
    // of one side, and `PASSING` from `passing` on are those of the other. All lanes of a warp call
    // it.
    template <int COUNT, int TILE, int PASSING> DEVICE bool all(Span span, int first, int key, int passing) const {
        if (S::POSITIONS || S::Program::MASKS || key + TILE > S::KEYS || key + TILE - 1 > first) return false;
        if (S::WINDOW > 0 && first + COUNT - 1 - key >= S::WINDOW) return false;
        if (!S::SEGMENTS) return true;
        bool same = span.low == span.high;
#pragma unroll
        for (int i = int(threadIdx.x % 32); i < PASSING; i += 32)
            same &= passing + i >= S::QUERIES || segments[passing + i] == span.low;
        return __all_sync(ALL_LANES, same);
    }

    // The first tile from `key` on with a key that these queries may see, or `end`: most of a cache
    // is empty, most documents of a sequence are others, and an unseen key changes no sum. All
    // lanes of a warp call it, and all warps find the same.
    template <int TILE> DEVICE int next(Span span, int key, int end) const {
        key = next_near<TILE>(span, key, end);
        while (LISTED<typename S::Program> && key < end && !reads_some(head, span.first, span.count, key, TILE))
            key = next_near<TILE>(span, key + TILE, end);
        return key;
    }

    // Whether the lists of a head have some of these keys for some of these queries.
    DEVICE bool reads_some(int head, int query, int queries, int key, int keys) const {
        if constexpr (LISTED<typename S::Program>)
            return S::Program::some(reads, sequence, head, query, queries, key, keys);
        return true;
    }

    // The same whatever lists have.
    template <int TILE> DEVICE int next_near(Span span, int key, int end) const {
        if (BY_SEGMENT) {
            while (key < end && !near<TILE>(span, key)) key += TILE;
            return key < end ? key : end;
        }
        if (!S::POSITIONS) return key;
        for (; key < end; key += TILE) {
            bool some = false;
#pragma unroll
            for (int i = int(threadIdx.x % 32); i < TILE; i += 32) {
                int at = key + i < S::KEYS ? key_positions[key + i] : -1;
                some |= at >= 0 && at <= span.high && (S::WINDOW == 0 || i64(span.low) - at < S::WINDOW);
            }
            if (__any_sync(ALL_LANES, some)) return key;
        }
        return end;
    }

    // The tiles of keys that queries `first..first + COUNT` may see.
    template <int COUNT = OWN> static DEVICE void keys(int first, int &begin, int &end) {
        begin = 0;
        end = S::KEYS;
        if (S::POSITIONS) return;
        if (first + COUNT < end) end = first + COUNT;
        if (S::WINDOW > 0 && first + 1 > S::WINDOW) begin = (first + 1 - S::WINDOW) / LANES * LANES;
    }

    // The tiles of queries that may see keys `first..first + COUNT`.
    template <int COUNT = OWN> static DEVICE void queries(int first, int &begin, int &end) {
        begin = 0;
        end = S::QUERIES;
        if (S::POSITIONS) return;
        begin = first / LANES * LANES;
        if (S::WINDOW > 0 && first + COUNT - 1 + S::WINDOW < end) end = first + COUNT - 1 + S::WINDOW;
    }
};

// A score from a product, and the derivative of that.
template <class S> DEVICE float score(float product, float scale, float cap) {
    return S::CAPPED ? cap * tanhf(product * scale / cap) : product * scale;
}
template <class S> DEVICE float slope(float score, float scale, float cap) {
    float t = S::CAPPED ? score / cap : 0.0f;
    return scale * (1.0f - t * t);
}

// `COUNT` rows of a head into shared memory; zeros beyond the last row and beyond the head.
template <class S, int COUNT, class E>
DEVICE void load_rows(float *to, const E *from, i64 stride, int first, int rows) {
    // The padding of rows, too: loads of several elements reach into it.
    for (int i = threadIdx.x; i < COUNT * S::ROW; i += WARPS * 32) {
        int row = i / S::ROW, column = i % S::ROW;
        bool valid = first + row < rows && column < S::SIZE;
        to[i] = valid ? to_float(from[i64(first + row) * stride + column]) : 0.0f;
    }
}

// Products of a warp's rows with the row of the tile that the lane has.
template <class S> DEVICE void rows_by_tile(float (&out)[EACH], const float *own, const float *tile) {
    const float *mine = tile + threadIdx.x % 32 * S::ROW;
#pragma unroll
    for (int e = 0; e < EACH; ++e) out[e] = 0.0f;
#pragma unroll 8
    for (int d = 0; d < S::SIZE; ++d) {
        float x = mine[d];
#pragma unroll
        for (int e = 0; e < EACH; ++e) out[e] = fmaf(own[e * S::ROW + d], x, out[e]);
    }
}

// `sums += weights · tile`, the weights of the tile's rows lying across lanes.
template <class S>
DEVICE void add_tile(float (&sums)[EACH][S::PER_LANE], const float (&weights)[EACH], const float *tile) {
#pragma unroll 4
    for (int row = 0; row < LANES; ++row) {
        float w[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) w[e] = __shfl_sync(ALL_LANES, weights[e], row);
#pragma unroll
        for (int j = 0; j < S::PER_LANE; ++j) {
            float x = tile[row * S::ROW + j * 32 + threadIdx.x % 32];
#pragma unroll
            for (int e = 0; e < EACH; ++e) sums[e][j] = fmaf(w[e], x, sums[e][j]);
        }
    }
}

// Stores a warp's rows of a head.
template <class S, class E>
DEVICE void store_rows(const float (&sums)[EACH][S::PER_LANE], E *to, i64 stride, int first, int rows) {
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int j = 0; j < S::PER_LANE; ++j) {
            int column = j * 32 + int(threadIdx.x % 32);
            if (first + e < rows && column < S::SIZE) store(to[i64(first + e) * stride + column], sums[e][j]);
        }
}

template <class S> DEVICE void clear(float (&sums)[EACH][S::PER_LANE]) {
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int j = 0; j < S::PER_LANE; ++j) sums[e][j] = 0.0f;
}

// Shared memory: `OWN` queries, a tile of keys, and one of values unless these are the keys
// (`SAME`).
template <class S, bool SAME = false, class E>
DEVICE void attention(const E *q, i64 q_stride, const E *k, i64 k_stride, const E *v, i64 v_stride,
                      const int *query_positions, const int *key_positions, const int *segments, E *o, float *lse,
                      float scale, float cap, typename S::Reads reads = {}) {
    extern __shared__ __align__(16) float shared[];
    float *own = shared, *keys = own + OWN * S::ROW, *values = SAME ? keys : keys + LANES * S::ROW;
    u32 block = blockIdx.x;
    // The last queries of a causal sequence see most: they come first.
    int first = (S::QUERY_BLOCKS - 1 - int(take(block, S::QUERY_BLOCKS))) * OWN;
    int head = int(take(block, S::HEADS)), sequence = int(block), warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
    Mask<S> mask(query_positions, key_positions, segments, sequence, head, reads);
    i64 query_row = i64(sequence) * S::QUERIES, key_row = i64(sequence) * S::KEYS;
    int kv = head / S::GROUP * S::SIZE, mine = first + warp * EACH;

    load_rows<S, OWN>(own, q + query_row * q_stride + head * S::SIZE, q_stride, first, S::QUERIES);
    float result[EACH][S::PER_LANE], most[EACH], sum[EACH];
    clear<S>(result);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        most[e] = -infinity();
        sum[e] = 0.0f;
    }
    int begin, end;
    Mask<S>::keys(first, begin, end);
    auto span = mask.span(first);
    for (int key = begin; (key = mask.template next<LANES>(span, key, end)) < end; key += LANES) {
        __syncthreads();
        load_rows<S, LANES>(keys, k + key_row * k_stride + kv, k_stride, key, S::KEYS);
        if (!SAME) load_rows<S, LANES>(values, v + key_row * v_stride + kv, v_stride, key, S::KEYS);
        __syncthreads();
        float p[EACH];
        rows_by_tile<S>(p, own + warp * EACH * S::ROW, keys);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            float s = S::Program::SCORES ? mask.score(p[e] * scale, mine + e, key + lane) : score<S>(p[e], scale, cap);
            if (!mask.sees(mine + e, key + lane)) s = -infinity();
            float high = Largest::join(most[e], lanes<Largest, 32>(s, ALL_LANES));
            bool any = high > -infinity();
            p[e] = any ? expf(s - high) : 0.0f;
            float shrink = any ? expf(most[e] - high) : 1.0f;
            sum[e] = fmaf(sum[e], shrink, lanes<Sum, 32>(p[e], ALL_LANES));
            most[e] = high;
#pragma unroll
            for (int j = 0; j < S::PER_LANE; ++j) result[e][j] *= shrink;
        }
        add_tile<S>(result, p, values);
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        // A query that saw nothing is zero.
        float factor = sum[e] == 0.0f ? 0.0f : 1.0f / sum[e];
#pragma unroll
        for (int j = 0; j < S::PER_LANE; ++j) result[e][j] *= factor;
        if (lane == 0 && mine + e < S::QUERIES)
            lse[(query_row + mine + e) * S::HEADS + head] = sum[e] == 0.0f ? -infinity() : most[e] + logf(sum[e]);
    }
    constexpr i64 O_STRIDE = i64(S::HEADS) * S::SIZE;
    store_rows<S>(result, o + query_row * O_STRIDE + head * S::SIZE, O_STRIDE, mine, S::QUERIES);
}

// `along[row, head] = o · do`, less the cotangent of the logarithm of the denominators where there
// is one, which scores have as well. `T` lanes have a head of a row, `N` adjacent elements of it at
// a time.
template <class S, int T, int N, class E>
DEVICE void attention_along(const E *o, i64 o_stride, const E *d, i64 d_stride, const float *dlse, float *along) {
    i64 at = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / T, row = at / S::HEADS;
    if (row >= i64(S::BATCH) * S::QUERIES) return;
    int column = int(at % S::HEADS) * S::SIZE, lane = int(threadIdx.x % T);
    o += row * o_stride + column, d += row * d_stride + column;
    float sum = 0.0f;
#pragma unroll
    for (int i = lane * N; i < S::SIZE; i += T * N) sum += (load<N>(o + i) * load<N>(d + i)).template all<Sum>();
    sum = lanes<Sum, T>(sum, group_mask<T>());
    if (lane == 0) along[at] = dlse ? sum - dlse[at] : sum;
}

// The probability of a pair and the cotangent of its product.
template <class S>
DEVICE void pair_grad(const Mask<S> &mask, int query, int key, float product, float dp, float lse, float along,
                      float scale, float cap, float &p, float &ds) {
    bool any = mask.sees(query, key) && lse > -infinity();
    float s = S::Program::SCORES ? mask.score(product * scale, query, key) : score<S>(product, scale, cap);
    p = any ? expf(s - lse) : 0.0f;
    if (S::Program::SCORES) {
        // A pair of no weight gives nothing, whatever the slope is there.
        ds = p * (dp - along);
        ds = any && ds != 0.0f ? ds * mask.slope(product * scale, query, key) * scale : 0.0f;
    } else {
        ds = any ? p * (dp - along) * slope<S>(s, scale, cap) : 0.0f;
    }
}

// Shared memory: `OWN` queries and their cotangents, a tile of keys, a tile of values.
template <class S, class E>
DEVICE void attention_grad_queries(const E *q, i64 q_stride, const E *k, i64 k_stride, const E *v,
                                   i64 v_stride, const float *lse, const E *d, i64 d_stride,
                                   const int *query_positions, const int *key_positions, const int *segments, E *dq,
                                   i64 dq_stride, const float *along, float scale, float cap,
                                typename S::Reads reads = {}) {
    extern __shared__ __align__(16) float shared[];
    float *own = shared, *own_d = own + OWN * S::ROW, *keys = own_d + OWN * S::ROW, *values = keys + LANES * S::ROW;
    u32 block = blockIdx.x;
    int first = (S::QUERY_BLOCKS - 1 - int(take(block, S::QUERY_BLOCKS))) * OWN;
    int head = int(take(block, S::HEADS)), sequence = int(block), warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
    Mask<S> mask(query_positions, key_positions, segments, sequence, head, reads);
    i64 query_row = i64(sequence) * S::QUERIES, key_row = i64(sequence) * S::KEYS;
    int kv = head / S::GROUP * S::SIZE, mine = first + warp * EACH;

    load_rows<S, OWN>(own, q + query_row * q_stride + head * S::SIZE, q_stride, first, S::QUERIES);
    load_rows<S, OWN>(own_d, d + query_row * d_stride + head * S::SIZE, d_stride, first, S::QUERIES);
    float result[EACH][S::PER_LANE], my_lse[EACH], my_along[EACH];
    clear<S>(result);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        i64 at = (query_row + mine + e) * S::HEADS + head;
        my_lse[e] = mine + e < S::QUERIES ? lse[at] : -infinity();
        my_along[e] = mine + e < S::QUERIES ? along[at] : 0.0f;
    }
    int begin, end;
    Mask<S>::keys(first, begin, end);
    auto span = mask.span(first);
    for (int key = begin; (key = mask.template next<LANES>(span, key, end)) < end; key += LANES) {
        __syncthreads();
        load_rows<S, LANES>(keys, k + key_row * k_stride + kv, k_stride, key, S::KEYS);
        load_rows<S, LANES>(values, v + key_row * v_stride + kv, v_stride, key, S::KEYS);
        __syncthreads();
        float s[EACH], dp[EACH], p, ds[EACH];
        rows_by_tile<S>(s, own + warp * EACH * S::ROW, keys);
        rows_by_tile<S>(dp, own_d + warp * EACH * S::ROW, values);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            pair_grad<S>(mask, mine + e, key + lane, s[e], dp[e], my_lse[e], my_along[e], scale, cap, p, ds[e]);
        add_tile<S>(result, ds, keys);
    }
    store_rows<S>(result, dq + query_row * dq_stride + head * S::SIZE, dq_stride, mine, S::QUERIES);
}

// Shared memory: `OWN` keys and values, a tile of queries and one of their cotangents.
template <class S, class E>
DEVICE void attention_grad_keys(const E *q, i64 q_stride, const E *k, i64 k_stride, const E *v,
                                i64 v_stride, const float *lse, const E *d, i64 d_stride,
                                const int *query_positions, const int *key_positions, const int *segments, E *dk,
                                i64 dk_stride, E *dv, i64 dv_stride, const float *along, float scale, float cap,
                                typename S::Reads reads = {}) {
    extern __shared__ __align__(16) float shared[];
    float *keys = shared, *values = keys + OWN * S::ROW, *queries = values + OWN * S::ROW;
    float *cotangents = queries + LANES * S::ROW;
    u32 block = blockIdx.x;
    int first = int(take(block, S::KEY_BLOCKS)) * OWN, kv_head = int(take(block, S::KV_HEADS)), sequence = int(block);
    int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32), mine = first + warp * EACH, kv = kv_head * S::SIZE;
    Mask<S> mask(query_positions, key_positions, segments, sequence, 0, reads);
    i64 query_row = i64(sequence) * S::QUERIES, key_row = i64(sequence) * S::KEYS;

    load_rows<S, OWN>(keys, k + key_row * k_stride + kv, k_stride, first, S::KEYS);
    load_rows<S, OWN>(values, v + key_row * v_stride + kv, v_stride, first, S::KEYS);
    float result_k[EACH][S::PER_LANE], result_v[EACH][S::PER_LANE];
    clear<S>(result_k);
    clear<S>(result_v);
    int begin, end;
    Mask<S>::queries(first, begin, end);
    for (int query = begin; query < end; query += LANES) {
        for (int g = 0; g < S::GROUP; ++g) {
            int head = kv_head * S::GROUP + g, at = query + lane;
            mask.head = head;
            if (!mask.reads_some(head, query, LANES, first, OWN)) continue;
            __syncthreads();
            load_rows<S, LANES>(queries, q + query_row * q_stride + head * S::SIZE, q_stride, query, S::QUERIES);
            load_rows<S, LANES>(cotangents, d + query_row * d_stride + head * S::SIZE, d_stride, query, S::QUERIES);
            __syncthreads();
            float my_lse = at < S::QUERIES ? lse[(query_row + at) * S::HEADS + head] : -infinity();
            float my_along = at < S::QUERIES ? along[(query_row + at) * S::HEADS + head] : 0.0f;
            float s[EACH], dp[EACH], p[EACH], ds[EACH];
            rows_by_tile<S>(s, keys + warp * EACH * S::ROW, queries);
            rows_by_tile<S>(dp, values + warp * EACH * S::ROW, cotangents);
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                pair_grad<S>(mask, at, mine + e, s[e], dp[e], my_lse, my_along, scale, cap, p[e], ds[e]);
            add_tile<S>(result_k, ds, queries);
            add_tile<S>(result_v, p, cotangents);
        }
    }
    store_rows<S>(result_k, dk + key_row * dk_stride + kv, dk_stride, mine, S::KEYS);
    store_rows<S>(result_v, dv + key_row * dv_stride + kv, dv_stride, mine, S::KEYS);
}

// The bits of a query's list, of one sequence after another; a block for each. Keys beyond the
// query have none. Shared memory: a bit for each key, or for the number of each block.
template <class L, int QUERIES, int KEYS, int LISTS, int COUNT, int BLOCK, int EVERY, bool POSITIONS>
DEVICE void attention_bits(const int *chosen, const int *query_positions, const int *key_positions, u32 *bits) {
    extern __shared__ u32 words[];
    i64 row = blockIdx.x;
    int i = int(row % QUERIES), list = int(row / QUERIES % LISTS), sequence = int(row / QUERIES / LISTS);
    const int *blocks = chosen + ((i64(sequence) * QUERIES + i) * LISTS + list) * COUNT;
    bits += row * L::WORDS;
    for (int w = int(threadIdx.x); w < L::WORDS; w += int(blockDim.x)) words[w] = 0;
    __syncthreads();
    auto mark = [&](i64 n) { atomicOr(&words[n / 32], 1u << n % 32); };
    if (!POSITIONS) {
        for (int v = int(threadIdx.x); v < COUNT * BLOCK; v += int(blockDim.x)) {
            int block = blocks[v / BLOCK];
            i64 key = i64(block) * BLOCK + v % BLOCK;
            if (block >= 0 && key <= i && (key + 1) % EVERY == 0) mark(key);
        }
        __syncthreads();
        for (int w = int(threadIdx.x); w < L::WORDS; w += int(blockDim.x)) bits[w] = words[w];
        return;
    }
    for (int n = int(threadIdx.x); n < COUNT; n += int(blockDim.x))
        if (blocks[n] >= 0 && blocks[n] < KEYS) mark(blocks[n]);
    __syncthreads();
    int own = query_positions[i64(sequence) * QUERIES + i], lane = int(threadIdx.x % 32);
    for (int w = int(threadIdx.x / 32); w < L::WORDS; w += int(blockDim.x / 32)) {
        int key = w * 32 + lane, at = key < KEYS ? key_positions[i64(sequence) * KEYS + key] : -1;
        bool seen = at >= 0 && at <= own && (at + 1) % EVERY == 0;
        int block = seen ? at / BLOCK : 0;
        bool listed = block < KEYS && (words[block / 32] >> block % 32 & 1u);
        // Numbers beyond all keys are those of a cache that has few of many tokens.
        for (int n = 0; n < COUNT && block >= KEYS; ++n) listed |= blocks[n] == block;
        u32 word = __ballot_sync(ALL_LANES, seen && listed);
        if (lane == 0) bits[w] = word;
    }
}

// Which of 32 queries and 32 keys have a bit: a warp for 32 such tiles of the same queries.
template <class L, int QUERIES, int LISTS> DEVICE void attention_tiles(const u32 *bits, u32 *tiles, i64 count) {
    i64 at = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (at >= count) return;
    int lane = int(threadIdx.x % 32), first = int(at % L::TILE_WORDS) * 32, tile = int(at / L::TILE_WORDS % L::TILES);
    i64 list = at / L::TILE_WORDS / L::TILES;
    int query = tile * 32 + lane;
    u32 some = 0;
    for (int w = 0; w < 32 && first + w < L::WORDS; ++w) {
        bool any = query < QUERIES && bits[(list * QUERIES + query) * L::WORDS + first + w] != 0;
        some |= u32(__any_sync(ALL_LANES, any) ? 1 : 0) << w;
    }
    if (lane == 0) tiles[at] = some;
}
