// Matrix products: f32 on the ordinary cores, bf16 on the tensor cores with sums in f32.
//
// A block computes a tile of the result. Both operands pass through shared memory a slice of the
// sums at a time, through two buffers, so that the next slice is under way while this one is used;
// a thread keeps a small square of the tile in registers. Where an element comes from and what
// becomes of a result is up to the caller, by functors that see coordinates inside the bounds
// alone; that is how gathers, groups and epilogues share one kernel.
//
// Every sum goes through its terms in order: the bits of a result depend on its operands and on
// nothing else.
#pragma once
#include "prelude.cuh"

// Reads a slice of an operand into registers: `LINES` lines of `DEPTH`. Adjacent threads take
// adjacent elements of memory: along the depth where `DEPTH_FAST`, else along the lines.
template <int LINES, int DEPTH, int THREADS, int EACH, bool DEPTH_FAST, class Load>
DEVICE void read_slice(float (&r)[EACH], int lines, int first_k, int k, Load load) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int at = int(threadIdx.x) + i * THREADS;
        int line = DEPTH_FAST ? at / DEPTH : at % LINES, depth = DEPTH_FAST ? at % DEPTH : at / LINES;
        bool valid = line < lines && first_k + depth < k && (LINES * DEPTH % THREADS == 0 || at < LINES * DEPTH);
        r[i] = valid ? *load(line, first_k + depth) : 0.0f;
    }
}

template <int LINES, int DEPTH, int THREADS, int EACH, bool DEPTH_FAST, int STRIDE>
DEVICE void write_slice(const float (&r)[EACH], float (&to)[DEPTH][STRIDE]) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int at = int(threadIdx.x) + i * THREADS;
        int line = DEPTH_FAST ? at / DEPTH : at % LINES, depth = DEPTH_FAST ? at % DEPTH : at / LINES;
        if (LINES * DEPTH % THREADS == 0 || at < LINES * DEPTH) to[depth][line] = r[i];
    }
}

DEVICE int least(int a, int b) { return a < b ? a : b; }

// A tile on the ordinary cores: `ROWS` x `COLUMNS` of the result and `DEPTH` of the sums at a time;
// a thread has `Y` x `X`.
template <int ROWS_, int COLUMNS_, int DEPTH_, int Y, int X> struct Tile {
    static constexpr bool PAIRS = false, QUADS = false, STREAMS = false;
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEPTH = DEPTH_, BLOCKS = 1;
    static constexpr int ACROSS = COLUMNS / X, THREADS = ROWS / Y * ACROSS;
    // Odd strides would spoil vector loads; a stride of 4 beyond the tile keeps the writes of a
    // warp apart.
    static constexpr int A_STRIDE = ROWS + 4, B_STRIDE = COLUMNS + 4;
    static constexpr int A_EACH = (ROWS * DEPTH + THREADS - 1) / THREADS;
    static constexpr int B_EACH = (COLUMNS * DEPTH + THREADS - 1) / THREADS;

    typedef float Element;
    typedef float Sums[Y][X];
    struct Shared {
        __align__(16) float a[2][DEPTH][A_STRIDE];
        __align__(16) float b[2][DEPTH][B_STRIDE];
    };
    typedef Shared &Pipe;

    // Rows and columns of the tile that a thread has, where they are, and how many adjacent lanes
    // share its rows.
    static constexpr int OWN_ROWS = Y, OWN_COLUMNS = X, SHARERS = ACROSS;
    static DEVICE int row(int i) { return int(threadIdx.x) / ACROSS * Y + i; }
    static DEVICE int column(int j) { return int(threadIdx.x) % ACROSS * X + j; }
    static DEVICE float &at(Sums &sums, int i, int j) { return sums[i][j]; }

    // The tile of `Σ_k a(i, k) · b(j, k)` with `rows` x `columns` elements inside the matrix. `a`
    // and `b` give addresses, and their elements are adjacent along the depth where `.._FAST`, else
    // along the other coordinate.
    template <bool A_FAST, bool B_FAST, class A, class B>
    static DEVICE void multiply(Pipe &shared, Sums &sums, int rows, int columns, int k, A a, B b) {
        float next_a[A_EACH], next_b[B_EACH];
        auto read = [&](int first) {
            read_slice<ROWS, DEPTH, THREADS, A_EACH, A_FAST>(next_a, rows, first, k, a);
            read_slice<COLUMNS, DEPTH, THREADS, B_EACH, B_FAST>(next_b, columns, first, k, b);
        };
        auto write = [&](int buffer) {
            write_slice<ROWS, DEPTH, THREADS, A_EACH, A_FAST>(next_a, shared.a[buffer]);
            write_slice<COLUMNS, DEPTH, THREADS, B_EACH, B_FAST>(next_b, shared.b[buffer]);
        };
        int y = row(0), x = column(0);
#pragma unroll
        for (int i = 0; i < Y; ++i)
#pragma unroll
            for (int j = 0; j < X; ++j) sums[i][j] = 0.0f;
        read(0);
        write(0);
        __syncthreads();
        int buffer = 0;
        for (int first = 0; first < k; first += DEPTH) {
            bool more = first + DEPTH < k;
            if (more) read(first + DEPTH);
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                float p[Y], q[X];
#pragma unroll
                for (int i = 0; i < Y; ++i) p[i] = shared.a[buffer][d][y + i];
#pragma unroll
                for (int j = 0; j < X; ++j) q[j] = shared.b[buffer][d][x + j];
#pragma unroll
                for (int i = 0; i < Y; ++i)
#pragma unroll
                    for (int j = 0; j < X; ++j) sums[i][j] = fmaf(p[i], q[j], sums[i][j]);
            }
            // The other buffer was read before the barrier that ended the last round.
            if (more) write(1 - buffer);
            __syncthreads();
            buffer = 1 - buffer;
        }
    }
};

// A slice of a bf16 operand into shared memory in the layout of memory: `LINES` lines of `DEPTH`,
// zeros beyond the matrix. Lines are padded by 16 bytes, so that the eight rows of a matrix of
// `ldmatrix` fall into different banks. `WIDE`: every eighth element of a line of memory is aligned
// to 16 bytes, and copies are asynchronous.
template <int LINES, int DEPTH, int THREADS, bool FAST, bool WIDE, class Load>
DEVICE void copy_slice(bf16 *to, int lines, int first, int k, Load load) {
    constexpr int ACROSS = FAST ? DEPTH / 8 : LINES / 8, COUNT = LINES * DEPTH / 8;
    constexpr int STRIDE = (FAST ? DEPTH : LINES) + 8;
#pragma unroll
    for (int v = int(threadIdx.x); v < COUNT; v += THREADS) {
        // Not kept from slice to slice: the sums need the registers.
        int at = anew(v), outer = at / ACROSS, inner = at % ACROSS * 8;
        int line = FAST ? outer : inner, depth = first + (FAST ? inner : outer);
        int left = line < lines && depth < k ? least(8, FAST ? k - depth : lines - line) : 0;
        bf16 *place = to + outer * STRIDE + inner;
        if (WIDE) {
            copy_async(place, left > 0 ? load(line, depth) : load(0, 0), 2 * left);
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                bf16 zero = {0};
                place[e] = e < left ? *load(FAST ? line : line + e, FAST ? depth + e : depth) : zero;
            }
        }
    }
}

// A tile on the tensor cores: bf16 operands, f32 sums. `DOWN` x `ALONG` warps share the rows and
// columns; a warp has its part in pieces of 16 x 8. `PAIRS`: results have an even number of columns
// and an alignment by which two are stored at once.
template <int ROWS_, int COLUMNS_, int DOWN, int ALONG, bool WIDE, bool PAIRS_> struct Matrices {
    static constexpr bool PAIRS = PAIRS_, QUADS = PAIRS && COLUMNS_ / ALONG % 32 == 0, STREAMS = false;
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEPTH = 32, THREADS = DOWN * ALONG * 32, BLOCKS = 1;
    static constexpr int Y = ROWS / DOWN / 16, X = COLUMNS / ALONG / 8;
    static_assert(Y > 0 && X > 0 && X % 2 == 0, "a warp has whole pieces, and columns in pairs of them");
    // Lines of `DEPTH` or depths of lines, with their padding: whichever are more.
    static constexpr int A_SIZE = ROWS * DEPTH + 8 * (ROWS > DEPTH ? ROWS : DEPTH);
    static constexpr int B_SIZE = COLUMNS * DEPTH + 8 * (COLUMNS > DEPTH ? COLUMNS : DEPTH);

    typedef bf16 Element;
    typedef float Sums[Y][X][4];
    struct Shared {
        __align__(16) bf16 a[2][A_SIZE];
        __align__(16) bf16 b[2][B_SIZE];
    };
    typedef Shared &Pipe;

    static constexpr int OWN_ROWS = 2 * Y, OWN_COLUMNS = 2 * X, SHARERS = ALONG == 1 ? 4 : 0;
    static DEVICE int first_row() { return int(threadIdx.x) / 32 / ALONG * 16 * Y; }
    static DEVICE int first_column() { return int(threadIdx.x) / 32 % ALONG * 8 * X; }
    static DEVICE int row(int i) { return first_row() + i / 2 * 16 + i % 2 * 8 + int(threadIdx.x) % 32 / 4; }
    static DEVICE int column(int j) { return first_column() + j / 2 * 8 + int(threadIdx.x) % 4 * 2 + j % 2; }
    static DEVICE float &at(Sums &sums, int i, int j) { return sums[i / 2][j / 2][i % 2 * 2 + j % 2]; }

    template <bool A_FAST, bool B_FAST, class A, class B>
    static DEVICE void multiply(Pipe &shared, Sums &sums, int rows, int columns, int k, A a, B b) {
        int lane = int(threadIdx.x) % 32, row = first_row(), column = first_column();
#pragma unroll
        for (int i = 0; i < Y; ++i)
#pragma unroll
            for (int j = 0; j < X; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
        auto stage = [&](int buffer, int first) {
            if (first < k) {
                copy_slice<ROWS, DEPTH, THREADS, A_FAST, WIDE>(shared.a[buffer], rows, first, k, a);
                copy_slice<COLUMNS, DEPTH, THREADS, B_FAST, WIDE>(shared.b[buffer], columns, first, k, b);
            }
            copy_commit();
        };
        stage(0, 0);
        int buffer = 0;
        for (int first = 0; first < k; first += DEPTH) {
            stage(1 - buffer, first + DEPTH);
            copy_wait<1>();
            __syncthreads();
            const bf16 *tile_a = shared.a[buffer], *tile_b = shared.b[buffer];
#pragma unroll
            for (int d = 0; d < DEPTH; d += 16) {
                u32 left[Y][4], right[X / 2][4];
#pragma unroll
                for (int i = 0; i < Y; ++i) {
                    int line = row + i * 16;
                    if (A_FAST) load_matrices(left[i], tile_a + (line + lane % 16) * (DEPTH + 8) + d + lane / 16 * 8);
                    else
                        load_matrices_transposed(left[i], tile_a + (d + lane / 16 * 8 + lane % 8) * (ROWS + 8) + line +
                                                              lane / 8 % 2 * 8);
                }
#pragma unroll
                for (int j = 0; j < X / 2; ++j) {
                    int line = column + j * 16 + lane / 16 * 8;
                    if (B_FAST)
                        load_matrices(right[j], tile_b + (line + lane % 8) * (DEPTH + 8) + d + lane / 8 % 2 * 8);
                    else load_matrices_transposed(right[j], tile_b + (d + lane % 16) * (COLUMNS + 8) + line);
                }
#pragma unroll
                for (int i = 0; i < Y; ++i)
#pragma unroll
                    for (int j = 0; j < X; ++j)
                        multiply_matrices(sums[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
            }
            // The buffer is filled again in the next round.
            __syncthreads();
            buffer = 1 - buffer;
        }
    }
};

// Where a row of the results goes: each changed by a function of its column and the sum, and added
// to what is there if `ADD`.
template <bool ADD, class C, class Change> struct Put {
    static constexpr bool ADDS = ADD, NARROW = Alike<C, bf16>::value;
    C *to;
    Change change;
    // The addend of a result, or of two.
    DEVICE TwoFloats there(int at) const { return {ADD ? to_float(to[at]) : 0.0f, 0.0f}; }
    DEVICE TwoFloats there_two(int at) const { return ADD ? load_pair(to + at) : TwoFloats{0.0f, 0.0f}; }
    DEVICE void one(int at, TwoFloats there, float sum) const {
        float x = change(at, sum);
        store(to[at], ADD ? there.low + x : x);
    }
    DEVICE void two(int at, TwoFloats there, float first, float second) const {
        float x = change(at, first), y = change(at + 1, second);
        store_pair(to + at, ADD ? there.low + x : x, ADD ? there.high + y : y);
    }
    // Two as they are stored in bf16.
    DEVICE u32 packed(int at, float first, float second) const { return pack(change(at, first), change(at + 1, second)); }
};
template <bool ADD, class C, class Change> DEVICE Put<ADD, C, Change> put(C *to, Change change) { return {to, change}; }
template <bool ADD, class C> DEVICE auto put(C *to) {
    return put<ADD>(to, [](int, float sum) { return sum; });
}

// A thread's results in row `i`, whose first `left` columns are inside the matrix; all of them
// where `WHOLE`. Their addends are read in batches before any result of the batch is stored: no
// load can be moved over a store, and each would wait for memory alone.
template <class T, bool WHOLE, class To> DEVICE void put_row(typename T::Sums &sums, int i, int left, To to) {
    constexpr int STEP = T::PAIRS ? 2 : 1, BATCH = T::OWN_COLUMNS < 8 * STEP ? T::OWN_COLUMNS : 8 * STEP;
    static_assert(T::OWN_COLUMNS % BATCH == 0, "whole batches");
#pragma unroll
    for (int first = 0; first < T::OWN_COLUMNS; first += BATCH) {
        TwoFloats there[BATCH / STEP];
#pragma unroll
        for (int j = 0; j < BATCH; j += STEP) {
            int distance = T::column(first + j) - T::column(0);
            if (!WHOLE && distance >= left) continue;
            if constexpr (T::PAIRS) there[j / STEP] = to.there_two(distance);
            else there[j / STEP] = to.there(distance);
        }
#pragma unroll
        for (int j = 0; j < BATCH; j += STEP) {
            int distance = T::column(first + j) - T::column(0), at = first + j;
            if (!WHOLE && distance >= left) continue;
            if constexpr (T::PAIRS) to.two(distance, there[j / STEP], T::at(sums, i, at), T::at(sums, i, at + 1));
            else to.one(distance, there[j / STEP], T::at(sums, i, at));
        }
    }
}

// A row of a whole tile in bf16, eight adjacent elements of a lane at a time: four lanes have two
// elements each of four pieces, and give one another theirs until each has a piece. Stored two at a
// time a warp would fill half of each sector of memory that it writes. `first` is the row's first
// column of the lane, a multiple of 16 bytes for the first of the four.
template <class T, class To> DEVICE void put_quads(typename T::Sums &sums, int i, bool inside, To to) {
    int lane = int(threadIdx.x) % 4;
    bool odd = lane % 2, upper = lane / 2;
#pragma unroll
    for (int first = 0; first < T::OWN_COLUMNS; first += 8) {
        u32 w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int at = first + 2 * e;
            w[e] = to.packed(T::column(at) - T::column(0), T::at(sums, i, at), T::at(sums, i, at + 1));
        }
        // A transposition of four by four: by neighbours, then by pairs of them.
        auto swap = [](u32 &low, u32 &high, bool second, int distance) {
            u32 other = __shfl_xor_sync(ALL_LANES, second ? low : high, distance);
            if (second) low = other;
            else high = other;
        };
        swap(w[0], w[1], odd, 1), swap(w[2], w[3], odd, 1);
        swap(w[0], w[2], upper, 2), swap(w[1], w[3], upper, 2);
        bf16 *place = to.to + (T::column(first) - T::column(0) + 6 * lane);
        if (inside) *reinterpret_cast<uint4 *>(place) = {w[0], w[1], w[2], w[3]};
    }
}

// Gives every element of the tile inside the matrix to whoever wants it: `line(i, j)`, for a row of
// the tile and the first column that the thread has there, gives a `Put` for columns from that one
// on. The address of a row is computed once so, and its elements are distances that are known when
// this is compiled.
template <class T, class Line> DEVICE void each(typename T::Sums &sums, int rows, int columns, Line line) {
    int column = T::column(0), left = columns - column;
    typedef decltype(line(0, 0)) To;
    if constexpr (T::QUADS && !To::ADDS && To::NARROW) {
        // Whether the four lanes of a row begin at a multiple of 16 bytes, in every row.
        int lane = int(threadIdx.x) % 32;
        auto begin = [&](int row) { return u64(line(row, column).to - lane % 4 * 2); };
        if (columns == T::COLUMNS && (begin(0) | begin(rows > 1 ? 1 : 0)) % 16 == 0) {
#pragma unroll
            for (int i = 0; i < T::OWN_ROWS; ++i) {
                int row = T::row(i);
                // By whole warps, whose lanes give one another results.
                if (row - lane / 4 >= rows) continue;
                put_quads<T>(sums, i, row < rows, line(row < rows ? row : 0, column));
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < T::OWN_ROWS; ++i) {
        if (T::row(i) >= rows) continue;
        auto to = line(T::row(i), column);
        // Loads of a whole tile need no predicates; few predicate registers exist.
        if (decltype(to)::ADDS && columns == T::COLUMNS) put_row<T, true>(sums, i, left, to);
        else put_row<T, false>(sums, i, left, to);
    }
}

// Of the `m` rows those whose place is not negative, from number `first` on, a tile of them, in
// order; gives how many there are. All threads of the block call it, and all see the result.
template <int ROWS, int THREADS> DEVICE int needed_rows(const int *places, int m, int first, int (&rows)[ROWS]) {
    __shared__ int counts[THREADS / 32];
    int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32, found = 0;
    for (int start = 0; start < m && found < first + ROWS; start += THREADS) {
        bool needed = start + thread < m && places[start + thread] >= 0;
        u32 ballot = __ballot_sync(ALL_LANES, needed);
        if (lane == 0) counts[warp] = __popc(ballot);
        __syncthreads();
        int at = found - first + __popc(ballot & ((1u << lane) - 1u));
#pragma unroll
        for (int w = 0; w < THREADS / 32; ++w) {
            if (w < warp) at += counts[w];
            found += counts[w];
        }
        if (needed && at >= 0 && at < ROWS) rows[at] = start + thread;
        // Counts are written again in the next round, and rows are read after it.
        __syncthreads();
    }
    return least(ROWS, found - first);
}

// The rows of a tile, counted from `base`: `first` and those after it, or the next rows that are
// needed.
template <class T, bool SOME> struct TileRows {
    int base, count;
    int *rows;
    DEVICE TileRows(const int *places, int m, int first) : base(first), count(least(T::ROWS, m - first)), rows(nullptr) {
        if constexpr (SOME) {
            __shared__ int list[T::ROWS];
            count = needed_rows<T::ROWS, T::THREADS>(places, m, first, list);
            base = 0;
            rows = list;
        }
    }
    DEVICE int operator[](int i) const { return SOME ? rows[i] : i; }
};

// How many tiles of `size` cover `extent`.
DEVICE u32 tiles_over(int extent, int size) { return (u32(extent) + u32(size) - 1) / u32(size); }

// Offset of an element of an operand: along the depth, if `FAST`, elements are `NEAR` apart, and
// lines `far`; else it is the other way round.
template <bool FAST, int NEAR> DEVICE i64 element(int line, int depth, u32 far) {
    return i64(u64(u32(anew(FAST ? line : depth))) * far) + i64(FAST ? depth : line) * NEAR;
}

// An operand that threads read: a matrix, or the one of several that `of` names, from some line and
// depth on.
template <bool FAST, int NEAR, class E> struct Lines {
    const E *from;
    u32 far;
    DEVICE const E *operator()(int line, int depth) const { return from + element<FAST, NEAR>(line, depth, far); }
    DEVICE Lines at(int line, int depth) const { return {(*this)(line, depth), far}; }
    DEVICE Lines of(int matrix, i64 size) const { return {from + matrix * size, far}; }
    // Only so much of the depth is used, though the matrix goes on.
    DEVICE Lines cut() const { return *this; }
};

// Whatever an entry was given for an operand: an address, or, in `hopper.cuh`, a map for the copy
// engine.
template <bool FAST, int NEAR = 1, class E> DEVICE Lines<FAST, NEAR, E> operand(const E *from, u32 far) { return {from, far}; }

// An operand whose lines stand anywhere: line `i` is number `which[i]`.
template <class L> struct Picked {
    L lines;
    const int *which;
    DEVICE auto operator()(int i, int depth) const { return lines(which[i], depth); }
};
template <class L> DEVICE Picked<L> pick(L lines, const int *which) { return {lines, which}; }

// An operand whose depths stand anywhere: `which(k)` says where.
template <class L, class Which> struct PickedDepths {
    L lines;
    Which which;
    DEVICE auto operator()(int line, int depth) const { return lines(line, which(depth)); }
};
template <class L, class Which> DEVICE PickedDepths<L, Which> pick_depths(L lines, Which which) { return {lines, which}; }

// The tile of some rows of `a`: adjacent ones where it has them all, else one after another.
template <class T, bool A_FAST, bool B_FAST, bool SOME, class A, class B>
DEVICE void multiply_rows(typename T::Pipe &pipe, typename T::Sums &sums, const TileRows<T, SOME> &rows, int columns, int k,
                          A a, B b) {
    if constexpr (SOME)
        T::template multiply<A_FAST, B_FAST>(pipe, sums, rows.count, columns, k, pick(a, rows.rows), b);
    else T::template multiply<A_FAST, B_FAST>(pipe, sums, rows.count, columns, k, a, b);
}

// The tiles of this block, of `count`. Where warps of their own bring operands (`T::STREAMS`) there
// are as many blocks as the processors have at once, and a block goes from tile to tile: the next
// one's operands come while this one's results are stored. Elsewhere each block has one.
template <class T, class Each> DEVICE void tiles_of_block(u32 count, Each each) {
    if constexpr (T::STREAMS) {
#pragma unroll 1
        for (u32 tile = blockIdx.x; tile < count; tile += gridDim.x) each(tile);
    } else each(blockIdx.x);
}

// The same of tiles in rows of `across`, where blocks of a cluster (`T::BLOCKS`) have tiles of the
// same columns, one row of tiles below another. Their number is a multiple of that.
template <class T, class Each> DEVICE void tiles_of_cluster(u32 across, u32 down, Each each) {
    u32 rank = blockIdx.x % T::BLOCKS;
#pragma unroll 1
    for (u32 at = blockIdx.x / T::BLOCKS; at < across * (down / T::BLOCKS); at += gridDim.x / T::BLOCKS)
        each((at / across * T::BLOCKS + rank) * across + at % across);
    T::part();
}

// `c[m, n] (+)= Σ_k a[m, k] · b[k, n]`, the lines of `a` being its rows and those of `b` its
// columns. `SOME`: rows of negative place are left as they are. Sizes are arguments, not constants:
// products that differ in nothing else are one kernel.
template <class T, bool A_FAST, bool B_FAST, bool ADD, bool SOME = false, int A_NEAR = 1, int B_NEAR = 1, class A, class B,
          class C>
DEVICE void product(const A &a, const B &b, C *c, int m, int n, int k, u32 a_far, u32 b_far,
                    const int *places = nullptr) {
    __shared__ typename T::Shared shared;
    typename T::Pipe pipe(shared);
    u32 across = tiles_over(n, T::COLUMNS);
    auto tile = [&](u32 block) {
        int column = int(take(block, across)) * T::COLUMNS;
        TileRows<T, SOME> rows(places, m, int(block) * T::ROWS);
        if (SOME && rows.count <= 0) return;
        int columns = least(T::COLUMNS, n - column);
        C *to = c + (i64(rows.base) * n + column);
        typename T::Sums sums;
        multiply_rows<T, A_FAST, B_FAST>(pipe, sums, rows, columns, k, operand<A_FAST, A_NEAR>(a, a_far).at(rows.base, 0),
                                         operand<B_FAST, B_NEAR>(b, b_far).at(column, 0));
        each<T>(sums, rows.count, columns, [&](int i, int j) { return put<ADD>(to + (i64(rows[i]) * n + j)); });
    };
    // All threads of a block find the rows that are needed.
    if constexpr (SOME) tile(blockIdx.x);
    else if constexpr (T::BLOCKS > 1) tiles_of_cluster<T>(across, tiles_over(m, T::ROWS), tile);
    else tiles_of_block<T>(across * tiles_over(m, T::ROWS), tile);
}

// A slice of the sums, `depth` long, of a product whose result is too small to keep a GPU busy:
// `parts[slice][m, n]`.
template <class T, bool A_FAST, bool B_FAST, bool SOME = false, int A_NEAR = 1, int B_NEAR = 1, class A, class B>
DEVICE void product_slice(const A &a, const B &b, float *parts, int m, int n, int k, u32 a_far, u32 b_far, int depth,
                          const int *places = nullptr) {
    __shared__ typename T::Shared shared;
    u32 block = blockIdx.x;
    int column = int(take(block, tiles_over(n, T::COLUMNS))) * T::COLUMNS;
    TileRows<T, SOME> rows(places, m, int(take(block, tiles_over(m, T::ROWS))) * T::ROWS);
    if (SOME && rows.count <= 0) return;
    int first = int(block) * depth, columns = least(T::COLUMNS, n - column);
    parts += (i64(block) * m + rows.base) * n + column;
    typename T::Sums sums;
    typename T::Pipe pipe(shared);
    multiply_rows<T, A_FAST, B_FAST>(pipe, sums, rows, columns, least(depth, k - first),
                                     operand<A_FAST, A_NEAR>(a, a_far).at(rows.base, first),
                                     operand<B_FAST, B_NEAR>(b, b_far).at(column, first));
    each<T>(sums, rows.count, columns, [&](int i, int j) { return put<false>(parts + (i64(rows[i]) * n + j)); });
}

// Adds the slices up in order.
template <bool ADD, bool SOME = false, class C>
DEVICE void add_slices(const float *parts, C *c, int m, int n, int slices, const int *places = nullptr) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x, size = i64(m) * n;
    if (at >= size || (SOME && places[at / n] < 0)) return;
    float sum = parts[at];
#pragma unroll 4
    for (int slice = 1; slice < slices; ++slice) sum += parts[slice * size + at];
    store(c[at], ADD ? to_float(c[at]) + sum : sum);
}
