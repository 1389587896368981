// The gradient of an embedding. Rows are sorted by id, stably, a digit of the id at a time; each
// block then adds up a fixed number of rows in order, and sums of an id over blocks are joined. So
// no block looks at all ids, many blocks share a frequent id, and every sum has one order.
#pragma once
#include "move.cuh"
#include "route.cuh"

// Sort key of rows: ids out of range come last.
template <int VOCAB> DEVICE int key_of(int id) { return u32(id) < u32(VOCAB) ? id : VOCAB; }

// The row at `place` of the order so far; the first digit finds them as they are.
template <bool FIRST> DEVICE int row_at(const int *order, int place) { return FIRST ? place : order[place]; }

// `counts[chunk][digit]`
template <int ROWS, int VOCAB, int SHIFT, int DIGITS>
DEVICE void digit_count(const int *ids, const int *order, int *counts, int *status, int launch) {
    count_chunk<ROWS, DIGITS>(
        [&](int place) {
            int id = ids[row_at<SHIFT == 0>(order, place)];
            if (SHIFT == 0 && u32(id) >= u32(VOCAB)) report(status, launch);
            return (key_of<VOCAB>(id) >> SHIFT) % DIGITS;
        },
        counts);
}

// The order by this digit as well, and the keys in that order.
template <int ROWS, int VOCAB, int SHIFT, int DIGITS>
DEVICE void digit_place(const int *ids, const int *order, int *counts, const int *offsets, int *next, int *keys) {
    place_chunk<ROWS, DIGITS>(
        [&](int place) { return (key_of<VOCAB>(ids[row_at<SHIFT == 0>(order, place)]) >> SHIFT) % DIGITS; }, counts,
        offsets, [&](int place, int to) {
            int row = row_at<SHIFT == 0>(order, place);
            next[to] = row;
            keys[to] = key_of<VOCAB>(ids[row]);
        });
}

// The first column of the thread, of `N`; `block` becomes the number of the part.
template <int WIDTH, int N, int THREADS> DEVICE int own_column(u32 &block) {
    constexpr int TILES = (WIDTH + THREADS * N - 1) / (THREADS * N);
    return (int(take(block, TILES)) * THREADS + int(threadIdx.x)) * N;
}

// Adds up places `PART` at a time. An id that begins and ends within goes to the table; of one that
// goes on, the sum before the first place where another begins is `heads[part]`, and that after the
// last is `tails[part]`.
template <int ROWS, int VOCAB, int WIDTH, int PART, bool ADD, int N, int THREADS>
DEVICE void embed_parts(const float *d, const int *order, const int *keys, float *table, float *heads, float *tails) {
    constexpr int AHEAD = 8;
    __shared__ int rows[PART], ids[PART + 1];
    u32 block = blockIdx.x;
    int column = own_column<WIDTH, N, THREADS>(block), first = int(block) * PART;
    for (int i = threadIdx.x; i <= PART; i += THREADS) {
        ids[i] = first + i < ROWS ? keys[first + i] : VOCAB;
        if (i < PART) rows[i] = first + i < ROWS ? order[first + i] : 0;
    }
    __syncthreads();
    if (column >= WIDTH) return;
    bool head = first > 0 && keys[first - 1] == ids[0];
    i64 own = i64(block) * WIDTH + column;
    Floats<N> sum = 0.0f;
    for (int i = 0; i < PART; i += AHEAD) {
        Floats<N> ahead[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
            ahead[j] = ids[i + j] < VOCAB ? load<N>(d + i64(rows[i + j]) * WIDTH + column) : Floats<N>(0.0f);
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            int id = ids[i + j];
            if (id == VOCAB) return;
            sum = sum + ahead[j];
            bool ends = ids[i + j + 1] != id;
            if (!ends && i + j + 1 < PART) continue;
            float *to = table + i64(id) * WIDTH + column;
            if (head) store(heads + own, sum);
            else if (!ends) store(tails + own, sum);
            else store(to, ADD ? load<N>(to) + sum : sum);
            sum = 0.0f;
            head = false;
        }
    }
}

// Sums of ids in several parts, by the block of the part where each begins.
template <int ROWS, int VOCAB, int WIDTH, int PART, bool ADD, int N, int THREADS>
DEVICE void embed_join(const int *keys, const float *heads, const float *tails, float *table) {
    constexpr int PARTS = (ROWS + PART - 1) / PART;
    __shared__ float buffer[THREADS / 32];
    u32 block = blockIdx.x;
    int column = own_column<WIDTH, N, THREADS>(block), part = int(block), end = (part + 1) * PART;
    int id = end < ROWS ? keys[end] : VOCAB;
    // Whether the last id of a part goes on in the next.
    auto goes_on = [&](int part) { return (part + 1) * PART < ROWS && keys[(part + 1) * PART - 1] == id && keys[(part + 1) * PART] == id; };
    if (id == VOCAB || !goes_on(part)) return;
    if (part > 0 && keys[part * PART] == id && keys[part * PART - 1] == id) return;
    float more = 0.0f;
    for (int p = part + 1 + int(threadIdx.x); p < PARTS; p += THREADS) more += goes_on(p) ? 1.0f : 0.0f;
    int last = part + 1 + int(threads<Sum, THREADS>(more, buffer));
    if (column >= WIDTH) return;
    Floats<N> sum = load<N>(tails + i64(part) * WIDTH + column);
#pragma unroll 8
    for (int p = part + 1; p <= last; ++p) sum = sum + load<N>(heads + i64(p) * WIDTH + column);
    float *to = table + i64(id) * WIDTH + column;
    store(to, ADD ? load<N>(to) + sum : sum);
}
