// Matrix products in f32 on the ordinary cores.
//
// A block computes a tile of the result. Both operands pass through shared memory a slice of the sums at a time, through
// two buffers, so that the next slice is under way while this one is used; a thread keeps a small square of the tile in
// registers. Where an element comes from and what becomes of a result is up to the caller, by functors that see
// coordinates inside the bounds alone; that is how gathers, groups and epilogues share one kernel.
//
// Every sum goes through its terms in order: the bits of a result depend on its operands and on nothing else.
#pragma once
#include "prelude.cuh"

// `ROWS` x `COLUMNS` of the result and `DEPTH` of the sums at a time; a thread has `Y` x `X` of it.
template <int ROWS_, int COLUMNS_, int DEPTH_, int Y_, int X_> struct Tile {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEPTH = DEPTH_, Y = Y_, X = X_;
    static constexpr int ACROSS = COLUMNS / X, THREADS = ROWS / Y * ACROSS;
    // Odd strides would spoil vector loads; a stride of 4 beyond the tile keeps the writes of a warp apart.
    static constexpr int A_STRIDE = ROWS + 4, B_STRIDE = COLUMNS + 4;
    static constexpr int A_EACH = (ROWS * DEPTH + THREADS - 1) / THREADS;
    static constexpr int B_EACH = (COLUMNS * DEPTH + THREADS - 1) / THREADS;

    struct Shared {
        __align__(16) float a[2][DEPTH][A_STRIDE];
        __align__(16) float b[2][DEPTH][B_STRIDE];
    };
};

// Reads a slice of an operand into registers: `LINES` lines of `DEPTH`. Adjacent threads take adjacent elements of memory:
// along the depth where `DEPTH_FAST`, else along the lines.
template <int LINES, int DEPTH, int THREADS, int EACH, bool DEPTH_FAST, class Load>
DEVICE void read_slice(float (&r)[EACH], int lines, int first_k, int k, Load load) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int at = int(threadIdx.x) + i * THREADS;
        int line = DEPTH_FAST ? at / DEPTH : at % LINES, depth = DEPTH_FAST ? at % DEPTH : at / LINES;
        bool valid = line < lines && first_k + depth < k && (LINES * DEPTH % THREADS == 0 || at < LINES * DEPTH);
        r[i] = valid ? load(line, first_k + depth) : 0.0f;
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

// The tile of `Σ_k a(i, k) · b(j, k)` with `rows` x `columns` elements inside the matrix, into `sums`.
template <class T, bool A_DEPTH_FAST, bool B_DEPTH_FAST, class A, class B>
DEVICE void multiply(typename T::Shared &shared, float (&sums)[T::Y][T::X], int rows, int columns, int k, A a, B b) {
    float next_a[T::A_EACH], next_b[T::B_EACH];
    auto read = [&](int first) {
        read_slice<T::ROWS, T::DEPTH, T::THREADS, T::A_EACH, A_DEPTH_FAST>(next_a, rows, first, k, a);
        read_slice<T::COLUMNS, T::DEPTH, T::THREADS, T::B_EACH, B_DEPTH_FAST>(next_b, columns, first, k, b);
    };
    auto write = [&](int buffer) {
        write_slice<T::ROWS, T::DEPTH, T::THREADS, T::A_EACH, A_DEPTH_FAST>(next_a, shared.a[buffer]);
        write_slice<T::COLUMNS, T::DEPTH, T::THREADS, T::B_EACH, B_DEPTH_FAST>(next_b, shared.b[buffer]);
    };
    int y = int(threadIdx.x) / T::ACROSS * T::Y, x = int(threadIdx.x) % T::ACROSS * T::X;
#pragma unroll
    for (int i = 0; i < T::Y; ++i)
#pragma unroll
        for (int j = 0; j < T::X; ++j) sums[i][j] = 0.0f;
    read(0);
    write(0);
    __syncthreads();
    int buffer = 0;
    for (int first = 0; first < k; first += T::DEPTH) {
        bool more = first + T::DEPTH < k;
        if (more) read(first + T::DEPTH);
#pragma unroll
        for (int d = 0; d < T::DEPTH; ++d) {
            float p[T::Y], q[T::X];
#pragma unroll
            for (int i = 0; i < T::Y; ++i) p[i] = shared.a[buffer][d][y + i];
#pragma unroll
            for (int j = 0; j < T::X; ++j) q[j] = shared.b[buffer][d][x + j];
#pragma unroll
            for (int i = 0; i < T::Y; ++i)
#pragma unroll
                for (int j = 0; j < T::X; ++j) sums[i][j] = fmaf(p[i], q[j], sums[i][j]);
        }
        // The other buffer was read before the barrier that ended the last round.
        if (more) write(1 - buffer);
        __syncthreads();
        buffer = 1 - buffer;
    }
}

// Calls `to(i, j, sum)` for every element of the tile inside the matrix.
template <class T, class To> DEVICE void each(const float (&sums)[T::Y][T::X], int rows, int columns, To to) {
    int y = int(threadIdx.x) / T::ACROSS * T::Y, x = int(threadIdx.x) % T::ACROSS * T::X;
#pragma unroll
    for (int i = 0; i < T::Y; ++i)
#pragma unroll
        for (int j = 0; j < T::X; ++j)
            if (y + i < rows && x + j < columns) to(y + i, x + j, sums[i][j]);
}

DEVICE int least(int a, int b) { return a < b ? a : b; }

// `c[M, N] (+)= Σ_k a[m, k] · b[k, n]` for any layouts of `a` and `b`.
template <class T, int M, int N, int K, i64 A_ROW, i64 A_COLUMN, i64 B_ROW, i64 B_COLUMN, bool ADD>
DEVICE void product(const float *a, const float *b, float *c) {
    __shared__ typename T::Shared shared;
    u32 block = blockIdx.x;
    int column = int(take(block, (N + T::COLUMNS - 1) / T::COLUMNS)) * T::COLUMNS, row = int(block) * T::ROWS;
    int rows = least(T::ROWS, M - row), columns = least(T::COLUMNS, N - column);
    float sums[T::Y][T::X];
    multiply<T, (A_COLUMN <= A_ROW), (B_ROW <= B_COLUMN)>(
        shared, sums, rows, columns, K,
        [&](int i, int k) { return a[i64(row + i) * A_ROW + i64(k) * A_COLUMN]; },
        [&](int j, int k) { return b[i64(k) * B_ROW + i64(column + j) * B_COLUMN]; });
    each<T>(sums, rows, columns, [&](int i, int j, float sum) {
        float *to = c + i64(row + i) * N + (column + j);
        *to = ADD ? *to + sum : sum;
    });
}

// A slice of the sums of a product whose result is too small to keep a GPU busy: `parts[slice][M, N]`.
template <class T, int M, int N, int K, i64 A_ROW, i64 A_COLUMN, i64 B_ROW, i64 B_COLUMN, int SLICE>
DEVICE void product_slice(const float *a, const float *b, float *parts) {
    __shared__ typename T::Shared shared;
    u32 block = blockIdx.x;
    int column = int(take(block, (N + T::COLUMNS - 1) / T::COLUMNS)) * T::COLUMNS;
    int row = int(take(block, (M + T::ROWS - 1) / T::ROWS)) * T::ROWS;
    int first = int(block) * SLICE, rows = least(T::ROWS, M - row), columns = least(T::COLUMNS, N - column);
    float sums[T::Y][T::X];
    multiply<T, (A_COLUMN <= A_ROW), (B_ROW <= B_COLUMN)>(
        shared, sums, rows, columns, least(SLICE, K - first),
        [&](int i, int k) { return a[i64(row + i) * A_ROW + i64(first + k) * A_COLUMN]; },
        [&](int j, int k) { return b[i64(first + k) * B_ROW + i64(column + j) * B_COLUMN]; });
    float *to = parts + i64(block) * M * N;
    each<T>(sums, rows, columns, [&](int i, int j, float sum) { to[i64(row + i) * N + (column + j)] = sum; });
}

// Adds the slices up in order.
template <int M, int N, int SLICES, bool ADD> DEVICE void add_slices(const float *parts, float *c) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x, size = i64(M) * N;
    if (at >= size) return;
    float sum = parts[at];
#pragma unroll 4
    for (int slice = 1; slice < SLICES; ++slice) sum += parts[slice * size + at];
    c[at] = ADD ? c[at] + sum : sum;
}
