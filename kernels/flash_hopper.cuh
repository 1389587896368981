// Attention along the sequence on Hopper (`sm_90a`): the rows of `flash.cuh` by two warpgroups, 64
// each, and a third that brings what they read. The two take turns: the tensor cores have the
// products of one while the other works on its softmax. Where a warpgroup's registers do not hold
// the sums of 64 rows, both have the same rows, all their scores, and half of their sums.
#pragma once
#include "flash.cuh"
#include "hopper.cuh"

// Heads of 64, 128 or 256 elements, whose rows begin on 16 bytes. A place in shared memory holds
// rows in blocks of 64 elements, each in the swizzle of 128 bytes, so that the same bytes are rows
// for one product and columns for the next. `SHARERS`: warpgroups that have the same rows.
template <class S_, int TILE_, int STAGES_, int SHARERS_ = 1> struct FlashWarpgroups {
    typedef S_ S;
    static constexpr bool WIDE = true;
    static constexpr int SHARERS = SHARERS_, ROWS = 128 / SHARERS, TILE = TILE_, STAGES = STAGES_, MULTIPLIERS = 256;
    static constexpr int PIECES = S::SIZE / 8 / SHARERS, BLOCKS = S::SIZE / 64;
    static_assert(S::SIZE % (64 * SHARERS) == 0 && TILE % 32 == 0, "whole blocks of the swizzle");
    static DEVICE int first_column() { return SHARERS > 1 ? int(threadIdx.x) / 128 * PIECES * 8 : 0; }
    static constexpr u32 OWN = ROWS * S::SIZE * 2, PASSING = TILE * S::SIZE * 2;

    typedef u32 Place;
    static DEVICE Place memory() { return tiles_memory(); }

    struct Rows {
        const TensorMap *map;
        int sequence, column;
    };
    static DEVICE Rows rows(const TensorMap &map, i64, int sequence, int, int column) { return {&map, sequence, column}; }

    // By the first lane of the warp that brings.
    template <int COUNT> static DEVICE void load(Place to, Rows rows, int first, u32 full) {
        if (threadIdx.x != MULTIPLIERS) return;
        barrier_expect(full, COUNT * S::SIZE * 2);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
            copy_box(to + u32(block * COUNT * 128), rows.map, rows.column + block * 64, first, rows.sequence, full);
    }

    template <class Each> static DEVICE void share(Each each) {
#pragma unroll
        for (int i = int(threadIdx.x % 32); i < TILE; i += 32) each(i);
    }

    // A place is full when the copies of all lanes of the warp that brings, and the bytes that it
    // told of, have come.
    typedef Ring<STAGES, 32, MULTIPLIERS / 32> Flow;
    typedef typename Flow::Shared Shared;

    // A warpgroup gives up the registers that the other two take.
    template <class Next, class Own, class Load>
    static DEVICE bool bring(Flow &flow, int at, int end, Next next, Own own, Load load) {
        if (threadIdx.x < MULTIPLIERS) {
            take_registers<240>();
            return false;
        }
        give_registers<24>();
        if (threadIdx.x >= MULTIPLIERS + 32) return true;
        bool first = true;
#pragma unroll 1
        for (; at < end; at = next(at)) {
            u32 full = flow.full();
            flow.wait_empty();
            if (first) own(full);
            load(flow.stage, at, full);
            // One lane told the copy engine; all look for the next tile together.
            __syncwarp();
            barrier_arrive_copies(full);
            first = false;
            flow.next();
        }
        return true;
    }

    // `AHEAD`: a turn on the tensor cores has the last products of a tile and the first of the
    // next, one after another without a wait, while the other warpgroup works on what its first
    // products gave. Elsewhere, where registers do not hold the products of two tiles, a warpgroup
    // waits in its turn.
    template <bool AHEAD, class Next, class Own, class Load, class First, class Between, class Last>
    static DEVICE void pass(Flow &flow, int at, int end, Next next, Own, Load, First first, Between between, Last last) {
        if (at >= end) return;
        auto release = [](u32 empty) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(empty);
        };
        // The first warpgroup begins.
        if (threadIdx.x >= 128) give_turn();
        take_turn();
        if constexpr (!AHEAD) {
#pragma unroll 1
            for (; at < end; at = next(at)) {
                flow.wait_full();
                first(flow.stage, at);
                give_turn();
                finish();
                between(flow.stage, at);
                take_turn();
                last(flow.stage);
                finish();
                release(flow.empty());
                flow.next();
            }
        } else {
            flow.wait_full();
            first(flow.stage, at);
            give_turn();
            finish();
            int after = next(at);
#pragma unroll 1
            while (after < end) {
                int stage = flow.stage;
                u32 empty = flow.empty();
                between(stage, at);
                flow.next();
                flow.wait_full();
                take_turn();
                last(stage);
                first(flow.stage, after);
                give_turn();
                finish();
                release(empty);
                at = after;
                after = next(at);
            }
            between(flow.stage, at);
            take_turn();
            last(flow.stage);
            finish();
        }
        // As many turns are given as are taken.
        if (threadIdx.x < 128) give_turn();
    }

    static DEVICE void multiply(float (&s)[TILE / 8][4], Place own, Place tile) {
        if (SHARERS == 1) own += threadIdx.x / 128 * 8192;
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
        if (SHARERS > 1) tile += threadIdx.x / 128 * u32(PIECES / 8 * TILE * 128);
        matrices_begin();
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) add_tiles<false>(sums, a[k], tile_at(tile + u32(k * 2048), TILE * 128));
    }

    // Barriers 2 and 3 of the block: whose turn it is.
    static DEVICE void take_turn() { meet<MULTIPLIERS>(2 + threadIdx.x / 128); }
    static DEVICE void give_turn() { pass_by<MULTIPLIERS>(3 - threadIdx.x / 128); }
    static DEVICE void finish() {
        matrices_commit();
        matrices_wait<0>();
    }
};
