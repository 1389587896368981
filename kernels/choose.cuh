// The blocks of keys that queries read: scores of the keys at ends of blocks, and the best of each
// list.
//
// Scores are sums in f32 in the order of a head's elements, as the naive kernel has them: choices
// by nearly equal scores are the same. They exist for some tiles of queries at a time. The best
// are found by the bits of the least score that is chosen, from the highest on, each by a count
// over the block; of equal scores lower numbers come first.
#pragma once
#include "prelude.cuh"

// Everything about a choice that is known when it is compiled. `ROWS`: queries of a tile.
template <int BATCH_, int QUERIES_, int KEYS_, int HEADS_, int KV_HEADS_, int SIZE_, int LISTS_, int COUNT_, int BLOCK_,
          int NEAR_, int FIRST_, int MEASURE_, bool WEIGHED_, bool POSITIONS_, bool SEGMENTS_, int ROWS_>
struct Choice {
    static constexpr int BATCH = BATCH_, QUERIES = QUERIES_, KEYS = KEYS_, HEADS = HEADS_, KV_HEADS = KV_HEADS_;
    static constexpr int SIZE = SIZE_, LISTS = LISTS_, COUNT = COUNT_, BLOCK = BLOCK_, NEAR = NEAR_, FIRST = FIRST_;
    static constexpr bool RELU = MEASURE_ == 1, SOFTMAX = MEASURE_ == 2;
    static constexpr bool WEIGHED = WEIGHED_, POSITIONS = POSITIONS_, SEGMENTS = SEGMENTS_;
    static constexpr int ROWS = ROWS_, TILES = (QUERIES + ROWS - 1) / ROWS, MEMBERS = HEADS / LISTS;
    // Keys that may have a score, and scores of each query: of lists, or of heads before a softmax.
    static constexpr int SCORED = POSITIONS ? KEYS : KEYS / BLOCK, KINDS = SOFTMAX ? HEADS : LISTS;

    // The key of that number among those that may have a score.
    static DEVICE int key(int n) { return POSITIONS ? n : n * BLOCK + BLOCK - 1; }
};

// Where queries and keys of a sequence stand.
template <class C> struct Places {
    const int *query_positions, *key_positions, *segments;

    DEVICE Places(const int *q, const int *k, const int *s, int sequence)
        : query_positions(C::POSITIONS ? q + i64(sequence) * C::QUERIES : nullptr),
          key_positions(C::POSITIONS ? k + i64(sequence) * C::KEYS : nullptr),
          segments(C::SEGMENTS ? s + i64(sequence) * C::QUERIES : nullptr) {}

    DEVICE int query(int i) const { return C::POSITIONS ? query_positions[i] : i; }
    DEVICE int key(int j) const { return C::POSITIONS ? key_positions[j] : j; }
    // A key without a place sees none and is seen by none.
    DEVICE bool sees(int i, int j) const {
        int at = key(j);
        bool seen = at >= 0 && at <= query(i) && (at + 1) % C::BLOCK == 0;
        return seen && (!C::SEGMENTS || segments[i] == segments[j]);
    }
};

// The number of keys from the first on that a query of a sequence may see.
template <class C> DEVICE int scored(int i) {
    return C::POSITIONS ? C::SCORED : (i + 1) / C::BLOCK;
}

constexpr int ACROSS = 64, DEEP = 32;

// Whether some list depends on a product of a tile: not where lists have room for all that their
// queries see, nor where no query sees a key. All threads call it.
template <class C> DEVICE bool decides(const Places<C> &places, int from, int first) {
    int last = from + C::ROWS < C::QUERIES ? from + C::ROWS : C::QUERIES;
    if (scored<C>(last - 1) + C::NEAR + C::FIRST <= C::COUNT) return false;
    if (!C::POSITIONS && !C::SEGMENTS) return true;
    int some = 0;
    for (int pair = int(threadIdx.x); pair < C::ROWS * ACROSS; pair += 256) {
        int i = from + pair / ACROSS, n = first + pair % ACROSS;
        some |= i < last && n < C::SCORED && places.sees(i, C::key(n)) ? 1 : 0;
    }
    return __syncthreads_or(some) != 0;
}

// Scores of a tile of queries with 64 keys; of what is not seen -inf, and zero where none decides.
// 256 threads, each with some
// rows and four keys. Shared memory: pieces of both, an element of all rows together.
template <class C, class E>
DEVICE void choose_scores(const E *q, i64 q_stride, const E *k, i64 k_stride, const int *query_positions,
                          const int *key_positions, const int *segments, const float *weights, float *scores, int tile,
                          float scale) {
    constexpr int ROWS = C::ROWS, EACH = ROWS / 16, TILES_OF_KEYS = (C::SCORED + ACROSS - 1) / ACROSS;
    __shared__ float queries[DEEP][ROWS + 4], keys[DEEP][ACROSS + 4];
    u32 block = blockIdx.x;
    int first = int(take(block, TILES_OF_KEYS)) * ACROSS, slot = int(block);
    tile += slot;
    if (tile >= C::BATCH * C::TILES) return;
    int sequence = tile / C::TILES, from = tile % C::TILES * ROWS;
    if (!C::POSITIONS && C::key(first) >= from + ROWS) return;
    Places<C> places(query_positions, key_positions, segments, sequence);
    q += i64(sequence) * C::QUERIES * q_stride, k += i64(sequence) * C::KEYS * k_stride;
    int x = int(threadIdx.x) % 16 * 4, y = int(threadIdx.x) / 16 * EACH, end = decides(places, from, first) ? C::SIZE : 0;
    for (int list = 0; list < C::LISTS; ++list) {
        float total[EACH][4];
#pragma unroll
        for (int r = 0; r < EACH; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) total[r][c] = 0.0f;
        for (int head = list * C::MEMBERS; head < (list + 1) * C::MEMBERS; ++head) {
            float dot[EACH][4];
#pragma unroll
            for (int r = 0; r < EACH; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) dot[r][c] = 0.0f;
            int of_query = head * C::SIZE, of_key = head / (C::HEADS / C::KV_HEADS) * C::SIZE;
            for (int deep = 0; deep < end; deep += DEEP) {
                __syncthreads();
                for (int v = int(threadIdx.x); v < DEEP * ROWS; v += 256) {
                    int row = v % ROWS, d = v / ROWS;
                    bool valid = from + row < C::QUERIES && deep + d < C::SIZE;
                    queries[d][row] = valid ? to_float(q[(from + row) * q_stride + of_query + deep + d]) : 0.0f;
                }
                for (int v = int(threadIdx.x); v < DEEP * ACROSS; v += 256) {
                    int row = v % ACROSS, d = v / ACROSS;
                    bool valid = first + row < C::SCORED && deep + d < C::SIZE;
                    keys[d][row] = valid ? to_float(k[C::key(first + row) * k_stride + of_key + deep + d]) : 0.0f;
                }
                __syncthreads();
#pragma unroll 8
                for (int d = 0; d < DEEP; ++d) {
#pragma unroll
                    for (int r = 0; r < EACH; ++r)
#pragma unroll
                        for (int c = 0; c < 4; ++c) dot[r][c] = fmaf(queries[d][y + r], keys[d][x + c], dot[r][c]);
                }
            }
#pragma unroll
            for (int r = 0; r < EACH; ++r) {
                int i = from + y + r;
                float weight = C::WEIGHED && i < C::QUERIES ? weights[(i64(sequence) * C::QUERIES + i) * C::HEADS + head] : 1.0f;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float s = scale * dot[r][c];
                    if (C::RELU) s = fmaxf(s, 0.0f);
                    if (C::WEIGHED) s *= weight;
                    total[r][c] += s;
                    if (!C::SOFTMAX || i >= C::QUERIES || first + x + c >= C::SCORED) continue;
                    bool seen = places.sees(i, C::key(first + x + c));
                    scores[((i64(slot) * ROWS + y + r) * C::KINDS + head) * C::SCORED + first + x + c] =
                        seen ? dot[r][c] : -infinity();
                }
            }
        }
#pragma unroll
        for (int r = 0; r < EACH; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                int i = from + y + r;
                if (C::SOFTMAX || i >= C::QUERIES || first + x + c >= C::SCORED) continue;
                bool seen = places.sees(i, C::key(first + x + c));
                scores[((i64(slot) * ROWS + y + r) * C::KINDS + list) * C::SCORED + first + x + c] =
                    seen ? total[r][c] : -infinity();
            }
    }
}

// The largest product and the denominator of each query and head, in the order of keys.
template <class C> DEVICE void choose_softmax(const float *scores, float *shares, int tile, float scale) {
    int at = int(blockIdx.x * blockDim.x + threadIdx.x), row = at / C::HEADS;
    tile += row / C::ROWS;
    int i = tile % C::TILES * C::ROWS + row % C::ROWS;
    if (tile >= C::BATCH * C::TILES || i >= C::QUERIES) return;
    scores += i64(at) * C::SCORED;
    float high = -infinity(), sum = 0.0f;
    for (int n = 0; n < scored<C>(i); ++n)
        if (scores[n] > -infinity()) high = fmaxf(high, scale * scores[n]);
    for (int n = 0; n < scored<C>(i); ++n)
        if (scores[n] > -infinity()) sum += expf(scale * scores[n] - high);
    store_pair(shares + 2 * i64(at), high, sum);
}

// A number that is the larger the larger a score is, and above 0.
DEVICE u32 rank_of(float score) {
    u32 bits = __float_as_uint(score), rank = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return rank > 0 ? rank : 1u;
}

constexpr int CHOOSERS = 256;

// The number of `n` for which `counts(n)` holds, over the block; all threads call it and have it.
template <class Counts> DEVICE int count_all(int n, int *buffer, Counts counts) {
    int sum = 0;
    for (int at = int(threadIdx.x); at < n; at += CHOOSERS) sum += counts(at);
    sum = int(__reduce_add_sync(ALL_LANES, u32(sum)));
    // The buffer may still be read from the count before.
    __syncthreads();
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int w = 0; w < CHOOSERS / 32; ++w) sum += buffer[w];
    return sum;
}

// The largest number that at least `least` numbers are not below; `from` what bits begin with.
template <class Counts> DEVICE u32 bound_of(int n, int least, int *buffer, Counts counts) {
    u32 bound = 0;
    for (u32 bit = 0x80000000u; bit > 0; bit /= 2) {
        u32 next = bound | bit;
        if (count_all(n, buffer, [&](int at) { return counts(at, next); }) >= least) bound = next;
    }
    return bound;
}

// The list of a query. Shared memory: its blocks, then the ranks of keys where `HELD`, else these
// take the place of its scores.
template <class C, bool HELD>
DEVICE void choose_best(float *scores, const float *shares, const float *weights, const int *query_positions,
                        const int *key_positions, int *chosen, int tile, float scale) {
    extern __shared__ __align__(16) int memory[];
    __shared__ int buffer[CHOOSERS / 32], again;
    int *blocks = memory;
    u32 block = blockIdx.x;
    int list = int(take(block, C::LISTS)), row = int(block), thread = int(threadIdx.x);
    tile += row / C::ROWS;
    int sequence = tile / C::TILES, i = tile % C::TILES * C::ROWS + row % C::ROWS;
    if (tile >= C::BATCH * C::TILES || i >= C::QUERIES) return;
    Places<C> places(query_positions, key_positions, nullptr, sequence);
    i64 query = i64(sequence) * C::QUERIES + i;
    chosen += (query * C::LISTS + list) * C::COUNT;
    int at = places.query(i), own = at < 0 ? -1 : at / C::BLOCK;
    // Blocks that are chosen whatever their scores: the last ones, then the first.
    int near = C::NEAR < own + 1 ? C::NEAR : own + 1;
    near = near < C::COUNT ? near : C::COUNT;
    int first = own + 1 - C::NEAR < C::FIRST ? own + 1 - C::NEAR : C::FIRST;
    first = first < C::COUNT - near ? first : C::COUNT - near;
    first = first > 0 ? first : 0;
    auto forced = [&](int number) { return number > own - near || number < first; };
    int left = C::COUNT - near - first, n = own < 0 ? 0 : scored<C>(i);
    auto number = [&](int e) { return C::POSITIONS ? places.key(e) / C::BLOCK : e; };

    float *mine = scores + (i64(row) * C::KINDS + (C::SOFTMAX ? list * C::MEMBERS : list)) * C::SCORED;
    u32 *ranks = HELD ? (u32 *)(memory + C::COUNT) : nullptr;
    auto rank = [&](int e) { return HELD ? ranks[e] : __float_as_uint(mine[e]); };
    auto set = [&](int e, u32 rank) {
        if (HELD) ranks[e] = rank;
        else mine[e] = __uint_as_float(rank);
    };
    for (int e = thread; e < n; e += CHOOSERS) {
        bool seen = mine[e] > -infinity();
        float score = C::SOFTMAX ? 0.0f : mine[e];
        if (C::SOFTMAX && seen)
            for (int m = 0; m < C::MEMBERS; ++m) {
                int head = list * C::MEMBERS + m;
                TwoFloats share = load_pair(shares + 2 * (i64(row) * C::HEADS + head));
                float s = scale * mine[i64(m) * C::SCORED + e];
                s = expf(s - share.low) / share.high;
                if (C::WEIGHED) s *= weights[query * C::HEADS + head];
                score += s;
            }
        set(e, seen && !forced(number(e)) ? rank_of(score) : 0u);
    }
    __syncthreads();
    u32 bound, of_equal;
    int found;
    do {
        // All ranks above the bound are chosen, and of those that are equal to it the lowest
        // numbers.
        bound = 1, of_equal = 0;
        if (left == 0) bound = 0xffffffffu, of_equal = 0xffffffffu;
        else if (count_all(n, buffer, [&](int e) { return rank(e) > 0; }) > left) {
            bound = bound_of(n, left, buffer, [&](int e, u32 least) { return rank(e) >= least; });
            int equal = left - count_all(n, buffer, [&](int e) { return rank(e) > bound; });
            of_equal = bound_of(n, equal, buffer,
                                [&](int e, u32 least) { return rank(e) == bound && 0x7fffffffu - number(e) >= least; });
        }
        auto taken = [&](int e) {
            return e < n && rank(e) > 0 && (rank(e) > bound || (rank(e) == bound && 0x7fffffffu - number(e) >= of_equal));
        };
        // They are listed in the order of keys, which is that of blocks where there are no places;
        // else what is forced comes before them, and the list holds keys first.
        found = C::POSITIONS ? near + first : 0;
        int all = C::POSITIONS ? n : own + 1;
        for (int from = 0; from < all; from += CHOOSERS) {
            int e = from + thread;
            bool some = taken(e) || (!C::POSITIONS && e < all && forced(e));
            u32 mask = __ballot_sync(ALL_LANES, some);
            __syncthreads();
            if (thread % 32 == 0) buffer[thread / 32] = __popc(mask);
            __syncthreads();
            int before = found + __popc(mask & ((1u << thread % 32) - 1u));
#pragma unroll
            for (int w = 0; w < CHOOSERS / 32; ++w) {
                before += w < thread / 32 ? buffer[w] : 0;
                found += buffer[w];
            }
            if (some && before < C::COUNT) blocks[before] = e;
        }
        found = found < C::COUNT ? found : C::COUNT;
        if (thread == 0) again = 0;
        __syncthreads();
        // A block whose end stands in two places counts once, by its larger score: the others are
        // no candidates any more.
        for (int from = near + first; C::POSITIONS && from < found; from += CHOOSERS) {
            int a = from + thread;
            bool drop = false;
            for (int b = near + first; a < found && b < found; ++b) {
                bool better = rank(blocks[b]) > rank(blocks[a]) || (rank(blocks[b]) == rank(blocks[a]) && b < a);
                drop |= better && number(blocks[a]) == number(blocks[b]);
            }
            __syncthreads();
            if (drop) set(blocks[a], 0u), again = 1;
            __syncthreads();
        }
    } while (C::POSITIONS && again);
    if (!C::POSITIONS) {
        for (int m = thread; m < C::COUNT; m += CHOOSERS) chosen[m] = m < found ? blocks[m] : -1;
        return;
    }
    auto block_of = [&](int m) {
        return m < near ? own - m : m < near + first ? m - near : number(blocks[m]);
    };
    for (int m = thread; m < C::COUNT; m += CHOOSERS) {
        if (m >= found) {
            chosen[m] = -1;
            continue;
        }
        int block = block_of(m), lower = 0;
        for (int other = 0; other < found; ++other) lower += block_of(other) < block;
        chosen[lower] = block;
    }
}
