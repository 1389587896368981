// Attention along the sequence on the tensor cores: bf16 operands, sums and softmax in f32.
//
// As in `attention.cuh`, with larger pieces: a warp works for 16 rows and a block for 64, which lie in shared memory; what
// passes by lies there `TILE` rows at a time, twice, so that the next ones are under way. A score goes from the
// fragment that a product gives straight into the fragment that the next one takes, rounded to bf16 on the way. Heads are
// multiples of 16 elements, of 128 at most: what a warp sums up lies in its registers.
#pragma once
#include "attention.cuh"

constexpr int BLOCK_ROWS = 64, TILE = 32;

template <class S, bool WIDE_> struct Flash {
    static constexpr bool WIDE = WIDE_;
    static constexpr int SIZE = S::SIZE, PIECES = SIZE / 8;
    // Rows are padded by 16 bytes, so that the eight rows of a matrix of `ldmatrix` fall into different banks.
    static constexpr int ROW = SIZE + 8;
    static_assert(SIZE % 16 == 0 && SIZE <= 128, "heads of a warp's registers");
    static constexpr int QUERY_BLOCKS = (S::QUERIES + BLOCK_ROWS - 1) / BLOCK_ROWS;
    static constexpr int KEY_BLOCKS = (S::KEYS + BLOCK_ROWS - 1) / BLOCK_ROWS;
};

// `COUNT` rows of a head into shared memory; zeros beyond the last row.
template <class F, int COUNT> DEVICE void load_head(bf16 *to, const bf16 *from, i64 stride, int first, int rows) {
    constexpr int ACROSS = F::SIZE / 8;
#pragma unroll
    for (int v = int(threadIdx.x); v < COUNT * ACROSS; v += 128) {
        int row = v / ACROSS, column = v % ACROSS * 8;
        bool valid = first + row < rows;
        const bf16 *source = from + (valid ? i64(first + row) * stride + column : 0);
        bf16 *place = to + row * F::ROW + column;
        if (F::WIDE) {
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

// A warp's 16 rows times the rows of the tile: `s[j]` has columns `8 j ..`.
template <class F> DEVICE void rows_by_rows(float (&s)[TILE / 8][4], const bf16 *own, const bf16 *tile) {
    int lane = int(threadIdx.x % 32);
#pragma unroll
    for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j][e] = 0.0f;
#pragma unroll
    for (int d = 0; d < F::SIZE; d += 16) {
        u32 a[4];
        load_matrices(a, own + lane % 16 * F::ROW + d + lane / 16 * 8);
#pragma unroll
        for (int j = 0; j < TILE / 16; ++j) {
            u32 b[4];
            load_matrices(b, tile + (j * 16 + lane / 16 * 8 + lane % 8) * F::ROW + d + lane / 8 % 2 * 8);
            multiply_matrices(s[2 * j], a, b[0], b[1]);
            multiply_matrices(s[2 * j + 1], a, b[2], b[3]);
        }
    }
}

// `sums += weights · tile`, the weights as `rows_by_rows` gives them.
template <class F>
DEVICE void add_rows(float (&sums)[F::PIECES][4], const float (&weights)[TILE / 8][4], const bf16 *tile) {
    int lane = int(threadIdx.x % 32);
#pragma unroll
    for (int k = 0; k < TILE / 16; ++k) {
        const float(&low)[4] = weights[2 * k], (&high)[4] = weights[2 * k + 1];
        u32 a[4] = {pack(low[0], low[1]), pack(low[2], low[3]), pack(high[0], high[1]), pack(high[2], high[3])};
#pragma unroll
        for (int d = 0; d < F::PIECES; d += 2) {
            u32 b[4];
            load_matrices_transposed(b, tile + (k * 16 + lane % 16) * F::ROW + d * 8 + lane / 16 * 8);
            multiply_matrices(sums[d], a, b[0], b[1]);
            multiply_matrices(sums[d + 1], a, b[2], b[3]);
        }
    }
}

template <class F> DEVICE void clear_rows(float (&sums)[F::PIECES][4]) {
#pragma unroll
    for (int d = 0; d < F::PIECES; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[d][e] = 0.0f;
}

// The row of the block and the column of the tile of element `e` of piece `j`.
DEVICE int row_of(int e) { return int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4 + e / 2 * 8; }
DEVICE int column_of(int j, int e) { return j * 8 + int(threadIdx.x) % 4 * 2 + e % 2; }

template <class F>
DEVICE void store_head(const float (&sums)[F::PIECES][4], bf16 *to, i64 stride, int first, int rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = first + row_of(2 * half);
        if (row >= rows) continue;
#pragma unroll
        for (int d = 0; d < F::PIECES; ++d) {
            bf16 *place = to + i64(row) * stride + column_of(d, 0);
            float low = sums[d][2 * half], high = sums[d][2 * half + 1];
            if (F::WIDE) {
                *(u32 *)place = pack(low, high);
            } else {
                store(place[0], low);
                store(place[1], high);
            }
        }
    }
}

// Shared memory: the queries, two tiles of keys, two of values.
template <class S, bool WIDE>
DEVICE void flash(const bf16 *q, i64 q_stride, const bf16 *k, i64 k_stride, const bf16 *v, i64 v_stride,
                  const int *query_positions, const int *key_positions, const int *segments, bf16 *o, float *lse,
                  float scale, float cap) {
    typedef Flash<S, WIDE> F;
    extern __shared__ __align__(16) bf16 rows[];
    bf16 *own = rows, *keys = own + BLOCK_ROWS * F::ROW, *values = keys + 2 * TILE * F::ROW;
    u32 block = blockIdx.x;
    // The last queries of a causal sequence see most: they come first.
    int first = (F::QUERY_BLOCKS - 1 - int(take(block, F::QUERY_BLOCKS))) * BLOCK_ROWS;
    int head = int(take(block, S::HEADS)), sequence = int(block), warp = int(threadIdx.x / 32);
    Mask<S> mask(query_positions, key_positions, segments, sequence);
    i64 query_row = i64(sequence) * S::QUERIES, key_row = i64(sequence) * S::KEYS;
    int kv = head / S::GROUP * S::SIZE;
    const bf16 *k_head = k + key_row * k_stride + kv, *v_head = v + key_row * v_stride + kv;

    int begin, end;
    Mask<S>::template keys<BLOCK_ROWS>(first, begin, end);
    auto span = mask.template span<BLOCK_ROWS>(first);
    auto next = [&](int key) { return mask.template next<TILE>(span, key, end); };
    begin = next(begin);
    auto stage = [&](int buffer, int key) {
        if (key < end) {
            load_head<F, TILE>(keys + buffer * TILE * F::ROW, k_head, k_stride, key, S::KEYS);
            load_head<F, TILE>(values + buffer * TILE * F::ROW, v_head, v_stride, key, S::KEYS);
        }
        copy_commit();
    };
    load_head<F, BLOCK_ROWS>(own, q + query_row * q_stride + head * S::SIZE, q_stride, first, S::QUERIES);
    stage(0, begin);
    float result[F::PIECES][4], most[2] = {-infinity(), -infinity()}, sum[2] = {0.0f, 0.0f};
    clear_rows<F>(result);
    int buffer = 0;
    for (int key = begin, after; key < end; key = after) {
        after = next(key + TILE);
        stage(1 - buffer, after);
        copy_wait<1>();
        __syncthreads();
        float p[TILE / 8][4];
        rows_by_rows<F>(p, own + warp * 16 * F::ROW, keys + buffer * TILE * F::ROW);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int query = first + row_of(2 * half);
            float high = most[half];
#pragma unroll
            for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    bool seen = mask.sees(query, key + column_of(j, e));
                    p[j][e] = seen ? score<S>(p[j][e], scale, cap) : -infinity();
                    high = Largest::join(high, p[j][e]);
                }
            // The four lanes of a row.
            high = lanes<Largest, 4>(high, group_mask<4>());
            bool any = high > -infinity();
            float shrink = any ? expf(most[half] - high) : 1.0f, part = 0.0f;
#pragma unroll
            for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    p[j][e] = any ? expf(p[j][e] - high) : 0.0f;
                    part += p[j][e];
                }
            sum[half] = fmaf(sum[half], shrink, lanes<Sum, 4>(part, group_mask<4>()));
            most[half] = high;
#pragma unroll
            for (int d = 0; d < F::PIECES; ++d) {
                result[d][2 * half] *= shrink;
                result[d][2 * half + 1] *= shrink;
            }
        }
        add_rows<F>(result, p, values + buffer * TILE * F::ROW);
        __syncthreads();
        buffer = 1 - buffer;
    }
    copy_wait<0>();
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
        int query = first + row_of(2 * half);
        if (threadIdx.x % 4 == 0 && query < S::QUERIES)
            lse[(query_row + query) * S::HEADS + head] = none ? -infinity() : most[half] + logf(sum[half]);
    }
    constexpr i64 O_STRIDE = i64(S::HEADS) * S::SIZE;
    store_head<F>(result, o + query_row * O_STRIDE + head * S::SIZE, O_STRIDE, first, S::QUERIES);
}

// Shared memory: the queries and their cotangents, two tiles of keys, two of values.
template <class S, bool WIDE>
DEVICE void flash_grad_queries(const bf16 *q, i64 q_stride, const bf16 *k, i64 k_stride, const bf16 *v, i64 v_stride,
                               const float *lse, const bf16 *d, i64 d_stride, const int *query_positions,
                               const int *key_positions, const int *segments, bf16 *dq, i64 dq_stride,
                               const float *along, float scale, float cap) {
    typedef Flash<S, WIDE> F;
    extern __shared__ __align__(16) bf16 rows[];
    bf16 *own = rows, *own_d = own + BLOCK_ROWS * F::ROW, *keys = own_d + BLOCK_ROWS * F::ROW;
    bf16 *values = keys + 2 * TILE * F::ROW;
    u32 block = blockIdx.x;
    int first = (F::QUERY_BLOCKS - 1 - int(take(block, F::QUERY_BLOCKS))) * BLOCK_ROWS;
    int head = int(take(block, S::HEADS)), sequence = int(block), warp = int(threadIdx.x / 32);
    Mask<S> mask(query_positions, key_positions, segments, sequence);
    i64 query_row = i64(sequence) * S::QUERIES, key_row = i64(sequence) * S::KEYS;
    int kv = head / S::GROUP * S::SIZE;
    const bf16 *k_head = k + key_row * k_stride + kv, *v_head = v + key_row * v_stride + kv;

    int begin, end;
    Mask<S>::template keys<BLOCK_ROWS>(first, begin, end);
    auto span = mask.template span<BLOCK_ROWS>(first);
    auto next = [&](int key) { return mask.template next<TILE>(span, key, end); };
    begin = next(begin);
    auto stage = [&](int buffer, int key) {
        if (key < end) {
            load_head<F, TILE>(keys + buffer * TILE * F::ROW, k_head, k_stride, key, S::KEYS);
            load_head<F, TILE>(values + buffer * TILE * F::ROW, v_head, v_stride, key, S::KEYS);
        }
        copy_commit();
    };
    load_head<F, BLOCK_ROWS>(own, q + query_row * q_stride + head * S::SIZE, q_stride, first, S::QUERIES);
    load_head<F, BLOCK_ROWS>(own_d, d + query_row * d_stride + head * S::SIZE, d_stride, first, S::QUERIES);
    stage(0, begin);
    float result[F::PIECES][4], my_lse[2], my_along[2];
    clear_rows<F>(result);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int query = first + row_of(2 * half);
        i64 at = (query_row + query) * S::HEADS + head;
        my_lse[half] = query < S::QUERIES ? lse[at] : -infinity();
        my_along[half] = query < S::QUERIES ? along[at] : 0.0f;
    }
    int buffer = 0;
    for (int key = begin, after; key < end; key = after) {
        after = next(key + TILE);
        stage(1 - buffer, after);
        copy_wait<1>();
        __syncthreads();
        float s[TILE / 8][4], dp[TILE / 8][4], p;
        rows_by_rows<F>(s, own + warp * 16 * F::ROW, keys + buffer * TILE * F::ROW);
        rows_by_rows<F>(dp, own_d + warp * 16 * F::ROW, values + buffer * TILE * F::ROW);
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                bool seen = mask.sees(first + row_of(e), key + column_of(j, e));
                pair_grad<S>(seen, s[j][e], dp[j][e], my_lse[e / 2], my_along[e / 2], scale, cap, p, s[j][e]);
            }
        add_rows<F>(result, s, keys + buffer * TILE * F::ROW);
        __syncthreads();
        buffer = 1 - buffer;
    }
    copy_wait<0>();
    store_head<F>(result, dq + query_row * dq_stride + head * S::SIZE, dq_stride, first, S::QUERIES);
}

// Shared memory: the keys and values, two tiles of queries, two of their cotangents.
template <class S, bool WIDE>
DEVICE void flash_grad_keys(const bf16 *q, i64 q_stride, const bf16 *k, i64 k_stride, const bf16 *v, i64 v_stride,
                            const float *lse, const bf16 *d, i64 d_stride, const int *query_positions,
                            const int *key_positions, const int *segments, bf16 *dk, i64 dk_stride, bf16 *dv,
                            i64 dv_stride, const float *along, float scale, float cap) {
    typedef Flash<S, WIDE> F;
    extern __shared__ __align__(16) bf16 rows[];
    bf16 *own = rows, *own_v = own + BLOCK_ROWS * F::ROW, *queries = own_v + BLOCK_ROWS * F::ROW;
    bf16 *cotangents = queries + 2 * TILE * F::ROW;
    u32 block = blockIdx.x;
    int first = int(take(block, F::KEY_BLOCKS)) * BLOCK_ROWS, kv_head = int(take(block, S::KV_HEADS));
    int sequence = int(block), warp = int(threadIdx.x / 32), kv = kv_head * S::SIZE;
    Mask<S> mask(query_positions, key_positions, segments, sequence);
    i64 query_row = i64(sequence) * S::QUERIES, key_row = i64(sequence) * S::KEYS;

    int begin, end;
    Mask<S>::template queries<BLOCK_ROWS>(first, begin, end);
    // Tiles of queries, each of all heads that read these keys.
    int tiles = end > begin ? (end - begin + TILE - 1) / TILE * S::GROUP : 0;
    auto stage = [&](int buffer, int tile) {
        if (tile < tiles) {
            int query = begin + tile / S::GROUP * TILE, head = (kv_head * S::GROUP + tile % S::GROUP) * S::SIZE;
            load_head<F, TILE>(queries + buffer * TILE * F::ROW, q + query_row * q_stride + head, q_stride, query,
                               S::QUERIES);
            load_head<F, TILE>(cotangents + buffer * TILE * F::ROW, d + query_row * d_stride + head, d_stride, query,
                               S::QUERIES);
        }
        copy_commit();
    };
    load_head<F, BLOCK_ROWS>(own, k + key_row * k_stride + kv, k_stride, first, S::KEYS);
    load_head<F, BLOCK_ROWS>(own_v, v + key_row * v_stride + kv, v_stride, first, S::KEYS);
    stage(0, 0);
    float result_k[F::PIECES][4], result_v[F::PIECES][4];
    clear_rows<F>(result_k);
    clear_rows<F>(result_v);
    int buffer = 0;
    for (int tile = 0; tile < tiles; ++tile) {
        stage(1 - buffer, tile + 1);
        copy_wait<1>();
        __syncthreads();
        int query = begin + tile / S::GROUP * TILE, head = kv_head * S::GROUP + tile % S::GROUP;
        float s[TILE / 8][4], dp[TILE / 8][4];
        rows_by_rows<F>(s, own + warp * 16 * F::ROW, queries + buffer * TILE * F::ROW);
        rows_by_rows<F>(dp, own_v + warp * 16 * F::ROW, cotangents + buffer * TILE * F::ROW);
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                int at = query + column_of(j, side);
                i64 place = (query_row + at) * S::HEADS + head;
                float my_lse = at < S::QUERIES ? lse[place] : -infinity();
                float my_along = at < S::QUERIES ? along[place] : 0.0f;
#pragma unroll
                for (int e = side; e < 4; e += 2) {
                    float p, ds;
                    pair_grad<S>(mask.sees(at, first + row_of(e)), s[j][e], dp[j][e], my_lse, my_along, scale, cap, p, ds);
                    s[j][e] = p;
                    dp[j][e] = ds;
                }
            }
        add_rows<F>(result_v, s, cotangents + buffer * TILE * F::ROW);
        add_rows<F>(result_k, dp, queries + buffer * TILE * F::ROW);
        __syncthreads();
        buffer = 1 - buffer;
    }
    copy_wait<0>();
    store_head<F>(result_k, dk + key_row * dk_stride + kv, dk_stride, first, S::KEYS);
    store_head<F>(result_v, dv + key_row * dv_stride + kv, dv_stride, first, S::KEYS);
}
