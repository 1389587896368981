// Matrix products on Hopper (`sm_90a`): a warpgroup of four warps multiplies 64 rows at once, both operands read from shared
// memory by the tensor cores themselves (`wgmma`), sums in f32 in registers.
//
// Beside `prelude.cuh` the only file with inline assembly: what `sm_80` has not.
#pragma once
#include "product.cuh"

// What threads wrote to shared memory, and what their copies did, the tensor cores see after it and a barrier.
DEVICE void show_to_matrices() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of sums are the warpgroup's own until `matrices_wait`.
DEVICE void matrices_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void matrices_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `N` groups of products are under way.
template <int N> DEVICE void matrices_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Where a tile with a swizzle of 128 bytes lies. Groups of eight lines are 1024 bytes apart; blocks of 64 lines that are
// stored along the lines, `leading`.
DEVICE u64 tile_at(u32 address, u32 leading) {
    return u64(address >> 4 & 0x3fff) | u64(leading >> 4) << 16 | u64(1024 >> 4) << 32 | 1ull << 62;
}

// A warpgroup's sums of 64 rows, as operands of an instruction and as they are named in its text.
#define PIECE(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define PIECES(i) PIECE(i), PIECE(i + 1), PIECE(i + 2), PIECE(i + 3)
#define SUMS_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64 SUMS_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_128 SUMS_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// `c = a · b` of 64 rows, 16 deep, or `c += a · b` where `add`; `.._FAST`: elements are adjacent along the depth.
#define MULTIPLY_TILES(N, SUMS, A, B, ADD, A_FAST_, B_FAST_, ...) \
    template <bool A_FAST, bool B_FAST> DEVICE void multiply_tiles(float (&c)[N / 8][4], u64 a, u64 b, int add) { \
        asm volatile("{\n.reg .pred add;\nsetp.ne.s32 add, %" #ADD ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SUMS "}, %" #A ", %" #B \
                     ", add, 1, 1, %" #A_FAST_ ", %" #B_FAST_ ";\n}" \
                     : __VA_ARGS__ \
                     : "l"(a), "l"(b), "r"(add), "n"(A_FAST ? 0 : 1), "n"(B_FAST ? 0 : 1)); \
    }
MULTIPLY_TILES(64, SUMS_32, 32, 33, 34, 35, 36, PIECES(0), PIECES(4))
MULTIPLY_TILES(128, SUMS_64, 64, 65, 66, 67, 68, PIECES(0), PIECES(4), PIECES(8), PIECES(12))
MULTIPLY_TILES(256, SUMS_128, 128, 129, 130, 131, 132, PIECES(0), PIECES(4), PIECES(8), PIECES(12), PIECES(16),
               PIECES(20), PIECES(24), PIECES(28))

// `c += a · b` with `a` in registers, 16 rows of it in each warp.
#define ADD_TILES(N, SUMS, A0, A1, A2, A3, B, B_FAST_, ...) \
    template <bool B_FAST> DEVICE void add_tiles(float (&c)[N / 8][4], const u32 (&a)[4], u64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SUMS "}, {%" #A0 ", %" #A1 ", %" #A2 \
                     ", %" #A3 "}, %" #B ", 1, 1, 1, %" #B_FAST_ ";" \
                     : __VA_ARGS__ \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_FAST ? 0 : 1)); \
    }
ADD_TILES(64, SUMS_32, 32, 33, 34, 35, 36, 37, PIECES(0), PIECES(4))
ADD_TILES(128, SUMS_64, 64, 65, 66, 67, 68, 69, PIECES(0), PIECES(4), PIECES(8), PIECES(12))

#undef ADD_TILES
#undef MULTIPLY_TILES
#undef SUMS_128
#undef SUMS_64
#undef SUMS_32
#undef PIECES
#undef PIECE

// Dynamic shared memory for tiles: what is asked for at the launch is 1024 bytes more than they take, and they begin at a
// multiple of that.
DEVICE u32 tiles_memory() {
    extern __shared__ __align__(1024) u8 tiles[];
    return (shared_address(tiles) + 1023) / 1024 * 1024;
}

// Lines of a bf16 operand, 64 elements deep, into shared memory as `wgmma` reads them: pieces of 16 bytes, eight to a row of
// 128 bytes, permuted within each group of eight rows. A row is a line; where elements are adjacent along the lines, it is a
// depth of 64 lines, and blocks of 64 lines follow one another.
template <int LINES, int THREADS, bool FAST, class Load>
DEVICE void copy_tile(u32 to, int lines, int first, int k, Load load) {
    constexpr int ACROSS = FAST ? 8 : LINES / 8;
#pragma unroll
    for (int i = 0; i < LINES * 8 / THREADS; ++i) {
        int v = int(threadIdx.x) + i * THREADS, outer = v / ACROSS, inner = v % ACROSS;
        int line = FAST ? outer : inner * 8, depth = first + (FAST ? inner * 8 : outer);
        int left = line < lines && depth < k ? least(8, FAST ? k - depth : lines - line) : 0;
        u32 place = u32(FAST ? 0 : inner / 8 * 8192) + u32(outer * 128) + u32((inner % 8 ^ outer % 8) * 16);
        copy_async_to(to + place, left > 0 ? load(line, depth) : load(0, 0), 2 * left);
    }
}

// A tile of two warpgroups, 64 rows each. `STAGES` slices of the operands are in shared memory or on their way; with four or more
// a slice is multiplied while the next is begun, with fewer another block of the processor fills the gaps.
template <int COLUMNS_, int STAGES> struct Warpgroups {
    static constexpr int ROWS = 128, COLUMNS = COLUMNS_, DEPTH = 64, THREADS = 256, X = COLUMNS / 8;
    static constexpr int UNDER_WAY = STAGES >= 4 ? 1 : 0, AHEAD = STAGES - 1 - UNDER_WAY;
    static constexpr u32 A_BYTES = ROWS * DEPTH * 2, STAGE_BYTES = A_BYTES + COLUMNS * DEPTH * 2;

    typedef bf16 Element;
    typedef float Sums[X][4];
    struct Shared {};

    static constexpr int OWN_ROWS = 2, OWN_COLUMNS = 2 * X, SHARERS = 4;
    static DEVICE int row(int i) { return int(threadIdx.x) / 32 * 16 + i * 8 + int(threadIdx.x) % 32 / 4; }
    static DEVICE int column(int j) { return j / 2 * 8 + int(threadIdx.x) % 4 * 2 + j % 2; }
    static DEVICE float &at(Sums &sums, int i, int j) { return sums[j / 2][i * 2 + j % 2]; }

    template <bool A_FAST, bool B_FAST, class A, class B>
    static DEVICE void multiply(Shared &, Sums &sums, int rows, int columns, int k, A a, B b) {
        u32 shared = tiles_memory(), half = threadIdx.x / 128 * 8192;
        int steps = (k + DEPTH - 1) / DEPTH;
        if (steps <= 0) {
#pragma unroll
            for (int j = 0; j < X; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[j][e] = 0.0f;
            return;
        }
        auto stage = [&](int step) {
            if (step < steps) {
                u32 tile = shared + u32(step % STAGES) * STAGE_BYTES;
                copy_tile<ROWS, THREADS, A_FAST>(tile, rows, step * DEPTH, k, a);
                copy_tile<COLUMNS, THREADS, B_FAST>(tile + A_BYTES, columns, step * DEPTH, k, b);
            }
            copy_commit();
        };
#pragma unroll 1
        for (int step = 0; step < AHEAD; ++step) stage(step);
        for (int step = 0; step < steps; ++step) {
            copy_wait<AHEAD - 1>();
            show_to_matrices();
            // All threads' copies of this slice have ended, and all have multiplied what the next copies overwrite.
            __syncthreads();
            stage(step + AHEAD);
            u32 tile = shared + u32(step % STAGES) * STAGE_BYTES;
            matrices_begin();
#pragma unroll
            for (int d = 0; d < DEPTH / 16; ++d) {
                u64 left = tile_at(tile + half + u32(A_FAST ? d * 32 : d * 2048), 8192);
                u64 right = tile_at(tile + A_BYTES + u32(B_FAST ? d * 32 : d * 2048), 8192);
                multiply_tiles<A_FAST, B_FAST>(sums, left, right, step + d);
            }
            matrices_commit();
            matrices_wait<UNDER_WAY>();
        }
        matrices_wait<0>();
        // The next tile's copies begin where the last slices are.
        __syncthreads();
    }
};
