// Attention along the sequence on Hopper (`sm_90a`): the rows of `flash.cuh` by two warpgroups, 64 each.
#pragma once
#include "flash.cuh"
#include "hopper.cuh"

// Heads of 64 or 128 elements, whose rows begin on 16 bytes. A place in shared memory holds rows in blocks of 64 elements, each
// in the swizzle of 128 bytes, so that the same bytes are rows for one product and columns for the next.
template <class S_, int TILE_> struct FlashWarpgroups {
    typedef S_ S;
    static constexpr bool WIDE = true;
    static constexpr int ROWS = 128, TILE = TILE_, THREADS = 256, PIECES = S::SIZE / 8, BLOCKS = S::SIZE / 64;
    static_assert(S::SIZE % 64 == 0 && TILE % 64 == 0, "whole blocks of the swizzle");
    static constexpr u32 OWN = ROWS * S::SIZE * 2, PASSING = TILE * S::SIZE * 2;

    typedef u32 Place;
    static DEVICE Place memory() { return tiles_memory(); }

    template <int COUNT> static DEVICE void load(Place to, const bf16 *from, i64 stride, int first, int rows) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
            copy_tile<COUNT, THREADS, true>(int(threadIdx.x), to + u32(block * COUNT * 128), rows - first, block * 64, S::SIZE,
                                            [&](int row, int column) { return from + (i64(first + row) * stride + column); });
    }

    static DEVICE void loaded() { show_to_matrices(); }

    static DEVICE void multiply(float (&s)[TILE / 8][4], Place own, Place tile) {
        own += threadIdx.x / 128 * 8192;
        matrices_begin();
#pragma unroll
        for (int d = 0; d < S::SIZE / 16; ++d) {
            u64 left = tile_at(own + u32(d / 4 * ROWS * 128 + d % 4 * 32), 8192);
            u64 right = tile_at(tile + u32(d / 4 * TILE * 128 + d % 4 * 32), 8192);
            multiply_tiles<true, true>(s, left, right, d);
        }
    }

    static DEVICE void add(float (&sums)[PIECES][4], const float (&weights)[TILE / 8][4], Place tile) {
        u32 a[TILE / 16][4];
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) fragment(a[k], weights[2 * k], weights[2 * k + 1]);
        matrices_begin();
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) add_tiles<false>(sums, a[k], tile_at(tile + u32(k * 2048), TILE * 128));
    }

    static DEVICE void finish() {
        matrices_commit();
        matrices_wait<0>();
    }
};
