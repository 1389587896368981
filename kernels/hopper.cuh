// Matrix products on Hopper (`sm_90a`): a warpgroup of four warps multiplies 64 rows at once, both
// operands read from shared memory by the tensor cores themselves (`wgmma`), sums in f32 in
// registers. Warps of their own bring the operands: the copy engine does it for them where lines
// are adjacent (TMA), and they copy gathered lines.
//
// The only file with inline assembly apart from `prelude.cuh`: instructions that `sm_80` lacks.
#pragma once
#include "product.cuh"

// Makes writes of threads and of their copies to shared memory visible to the tensor cores, if a
// barrier follows.
DEVICE void show_to_matrices() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of sums are the warpgroup's own until `matrices_wait`.
DEVICE void matrices_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void matrices_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `N` groups of products are under way.
template <int N> DEVICE void matrices_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Descriptor of a tile with a swizzle of 128 bytes. Groups of eight lines are 1024 bytes apart;
// blocks of 64 lines that are stored along the lines, `leading`.
DEVICE u64 tile_at(u32 address, u32 leading) {
    return u64(address >> 4 & 0x3fff) | u64(leading >> 4) << 16 | u64(1024 >> 4) << 32 | 1ull << 62;
}

// A warpgroup's sums of 64 rows, as operands of an instruction and as they are named in its text.
#define PIECE(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define PIECES(i) PIECE(i), PIECE(i + 1), PIECE(i + 2), PIECE(i + 3)
#define SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 SUMS_16 ", " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64 SUMS_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_128 SUMS_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// `c = a · b` of 64 rows, 16 deep, or `c += a · b` where `add`; `.._FAST`: elements are adjacent
// along the depth.
#define MULTIPLY_TILES(N, SUMS, A, B, ADD, A_FAST_, B_FAST_, ...) \
    template <bool A_FAST, bool B_FAST> DEVICE void multiply_tiles(float (&c)[N / 8][4], u64 a, u64 b, int add) { \
        asm volatile("{\n.reg .pred add;\nsetp.ne.s32 add, %" #ADD ", 0;\n" \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SUMS "}, %" #A ", %" #B \
                     ", add, 1, 1, %" #A_FAST_ ", %" #B_FAST_ ";\n}" \
                     : __VA_ARGS__ \
                     : "l"(a), "l"(b), "r"(add), "n"(A_FAST ? 0 : 1), "n"(B_FAST ? 0 : 1)); \
    }
MULTIPLY_TILES(32, SUMS_16, 16, 17, 18, 19, 20, PIECES(0))
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
ADD_TILES(256, SUMS_128, 128, 129, 130, 131, 132, 133, PIECES(0), PIECES(4), PIECES(8), PIECES(12), PIECES(16),
          PIECES(20), PIECES(24), PIECES(28))

// The same of codes of e4m3, 32 deep, adjacent along the depth. The sums have about 14 bits.
DEVICE void multiply_codes(float (&c)[16][4], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.s32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" SUMS_64 "}, %64, %65, add, 1, 1;\n}"
                 : PIECES(0), PIECES(4), PIECES(8), PIECES(12)
                 : "l"(a), "l"(b), "r"(add));
}

#undef ADD_TILES
#undef MULTIPLY_TILES
#undef SUMS_128
#undef SUMS_64
#undef SUMS_32
#undef SUMS_16
#undef PIECES
#undef PIECE

// Dynamic shared memory for tiles: what is asked for at the launch is 1024 bytes more than they
// take, and they begin at a multiple of that.
DEVICE u32 tiles_memory() {
    extern __shared__ __align__(1024) u8 tiles[];
    return (shared_address(tiles) + 1023) / 1024 * 1024;
}

// 16 bytes from memory into shared memory asynchronously, or zeros.
DEVICE void copy_or_clear(u32 to, const void *from, bool valid) { copy_async_to(to, from, valid ? 16 : 0); }

// 16 bytes of zeros.
DEVICE void clear_shared(u32 address) { asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory"); }

// Two adjacent bytes of shared memory.
DEVICE u32 two_bytes(u32 address) {
    u16 bytes;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(address) : "memory");
    return bytes;
}

// Registers of a thread from here on, for all threads of a warpgroup: what some give up others
// take.
template <int COUNT> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// A barrier of `THREADS` threads of the block, by its number; 0 is the barrier of all threads.
template <int THREADS> DEVICE void meet(u32 barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory"); }
// Counts as arrived there, and does not wait.
template <int THREADS> DEVICE void pass_by(u32 barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// --- barriers in shared memory that copies arrive at ---------------------------------------------

// Each phase takes `arrivals` arrivals; others see it after `show_barriers` and a block barrier.
DEVICE void barrier_begin(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when the copies that this thread began have ended.
DEVICE void barrier_arrive_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The phase ends when `bytes` more bytes have come.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of that parity; the one before the first is over.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
                 "@!over bra again;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}

// --- clusters ------------------------------------------------------------------------------------

// Blocks of a cluster run at once and reach into one another's shared memory. They stand side by
// side along x, so that a block's number in its cluster follows from its own.

// The same place in the shared memory of a block of the cluster.
DEVICE u32 place_in(u32 address, u32 block) {
    u32 place;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(address), "r"(block));
    return place;
}

// A fence of shared memory alone, where NVRTC knows it (12.8): an arrival that releases to a
// cluster, and a wait that acquires from it, make `ptxas` order all of the device's memory at each
// stage.
#define FENCES_SHARED (__CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208)

// Arrives at a barrier of any block of the cluster.
DEVICE void barrier_arrive_there(u32 barrier) {
#if FENCES_SHARED
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;\n"
                 "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
                 : "memory");
#else
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Waits as `barrier_wait` for arrivals of all blocks of the cluster.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
#if FENCES_SHARED
    asm volatile("{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 over, [%0], %1;\n"
                 "@!over bra again;\n}\nfence.acquire.sync_restrict::shared::cluster.cluster;" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
#else
    asm volatile("{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%0], %1;\n"
                 "@!over bra again;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
#endif
}

// All threads of all blocks of the cluster, whole warps at once.
DEVICE void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stages that some warps fill and others empty, in turns: each is full when `FULL` have arrived and
// all bytes that were announced have come, and empty when `EMPTY` have arrived in each of the
// `BLOCKS` of a cluster. All threads of the block make one, and each goes on for itself.
template <int STAGES, int FULL, int EMPTY, int BLOCKS = 1> struct Ring {
    struct Shared {
        u64 full[STAGES], empty[STAGES];
    };
    u32 first_full, first_empty;
    int stage = 0;
    u32 parity = 0;

    DEVICE explicit Ring(Shared &shared)
        : first_full(shared_address(shared.full)), first_empty(shared_address(shared.empty)) {
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; ++i) {
                barrier_begin(first_full + 8 * i, FULL);
                barrier_begin(first_empty + 8 * i, EMPTY * BLOCKS);
            }
            show_barriers();
        }
        if constexpr (BLOCKS > 1) {
            // Other blocks arrive here, and copy.
            __syncwarp();
            meet_cluster();
        } else __syncthreads();
    }

    // The barriers of the stage `back` before this one.
    DEVICE u32 full(int back = 0) const { return first_full + 8 * before(back); }
    DEVICE u32 empty(int back = 0) const { return first_empty + 8 * before(back); }
    DEVICE int before(int back) const { return stage >= back ? stage - back : stage - back + STAGES; }

    DEVICE void wait_full() const { barrier_wait(full(), parity); }
    DEVICE void wait_empty() const {
        if constexpr (BLOCKS > 1) barrier_wait_cluster(empty(), parity ^ 1);
        else barrier_wait(empty(), parity ^ 1);
    }
    // A warp has done with the stage `back` before this one, which others of the cluster fill, too.
    DEVICE void release(int back) const {
        u32 lane = threadIdx.x % 32;
        if constexpr (BLOCKS > 1) {
            if (lane < BLOCKS) barrier_arrive_there(place_in(empty(back), lane));
        } else if (lane == 0) barrier_arrive(empty(back));
    }
    DEVICE void next() {
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        parity ^= u32(stage == 0);
    }
};

// --- operands ------------------------------------------------------------------------------------

// A matrix of bf16, or several of one size, for the copy engine: what the driver makes of its
// address, its sizes, and the box that one copy brings. Elements outside the matrix come as zeros.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// A box at these places of the fastest, the other, and the matrices' dimension, into shared memory
// in the swizzle of 128 bytes.
DEVICE void copy_box(u32 to, const TensorMap *map, int fast, int slow, int matrix, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                     to),
                 "l"(map), "r"(fast), "r"(slow), "r"(matrix), "r"(barrier)
                 : "memory");
}

// The same into several blocks of a cluster, a bit for each: to the same place and the same barrier
// in each.
DEVICE void copy_box_to(u32 to, const TensorMap *map, int fast, int slow, int matrix, u32 barrier, u32 blocks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
                 "%3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(fast), "r"(slow), "r"(matrix), "r"(barrier), "h"(u16(blocks))
                 : "memory");
}

// An operand that the copy engine brings, from some line and depth on. `CUT`: its depth goes on
// after the depth that is used.
template <bool FAST, bool CUT_ = false> struct Boxes {
    static constexpr bool CUT = CUT_;
    const TensorMap *map;
    int line, depth, matrix;
    DEVICE Boxes at(int more_lines, int more_depth) const { return {map, line + more_lines, depth + more_depth, matrix}; }
    DEVICE Boxes of(int which, i64) const { return {map, line, depth, which}; }
    DEVICE Boxes<FAST, true> cut() const { return {map, line, depth, matrix}; }

    // Lines, 64 elements deep: as `copy_tile` puts them; to all `BLOCKS` of the cluster.
    template <int LINES, int BLOCKS = 1> DEVICE void copy(u32 to, int first, u32 barrier) const {
        auto box = [&](u32 place, int fast, int slow) {
            if constexpr (BLOCKS > 1) copy_box_to(place, map, fast, slow, matrix, barrier, (1u << BLOCKS) - 1);
            else copy_box(place, map, fast, slow, matrix, barrier);
        };
        if (FAST) box(to, depth + first, line);
        else {
#pragma unroll
            for (int block = 0; block < LINES / 64; ++block) box(to + block * 8192, line + block * 64, depth + first);
        }
    }
};

template <bool FAST, int NEAR = 1> DEVICE Boxes<FAST> operand(const TensorMap &map, u32) { return {&map, 0, 0, 0}; }

// Whether an operand is brought by the copy engine, and whether more of it is than is used.
template <class L> struct Brought {
    static constexpr bool BOXES = false, CUT = false;
};
template <bool FAST, bool CUT_> struct Brought<Boxes<FAST, CUT_>> {
    static constexpr bool BOXES = true, CUT = CUT_;
};

// Slices of an operand, 64 deep, into shared memory as `wgmma` reads them: pieces of 16 bytes,
// eight to a row of 128 bytes, permuted within each group of eight rows. A row is a line; where
// elements are adjacent along the lines, it is a depth of 64 lines, and blocks of 64 lines follow
// one another. The work of `THREADS` threads; this one is number `thread`; a thread finds once what
// all slices share.
template <class L, int LINES, int THREADS, bool FAST> struct Bringer;

// By the copy engine, started by one thread.
template <bool FAST, bool CUT, int LINES, int THREADS> struct Bringer<Boxes<FAST, CUT>, LINES, THREADS, FAST> {
    Boxes<FAST, CUT> boxes;
    int thread;
    DEVICE Bringer(Boxes<FAST, CUT> boxes, int thread, int, int) : boxes(boxes), thread(thread) {}
    DEVICE void bring(u32 to, int first, u32 full) {
        if (thread > 0) return;
        barrier_expect(full, LINES * 128);
        boxes.template copy<LINES>(to, first, full);
    }
};

// Lines that stand anywhere, of elements adjacent along the depth: a thread has pieces of the same
// lines in every slice, whose numbers it keeps. Lines beyond those that the tile has are the last
// one again: their results are of no row.
template <int NEAR, class E, int LINES, int THREADS>
struct Bringer<Picked<Lines<true, NEAR, E>>, LINES, THREADS, true> {
    static constexpr int EACH = LINES * 8 / THREADS, APART = THREADS / 8;
    const char *from;
    u32 far, place, numbers[EACH];
    int depth;
    DEVICE Bringer(const Picked<Lines<true, NEAR, E>> &picked, int thread, int lines, int k)
        : from(reinterpret_cast<const char *>(picked.lines.from) + thread % 8 * 16), far(2 * picked.lines.far),
          place(u32(thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16)), depth(k - thread % 8 * 8) {
        static_assert(APART % 8 == 0, "a thread's lines are permuted alike");
#pragma unroll
        for (int i = 0; i < EACH; ++i) numbers[i] = u32(picked.which[least(thread / 8 + i * APART, lines - 1)]);
    }
    DEVICE void bring(u32 to, int first, u32) {
        // Depths are multiples of eight: a piece is inside the matrix or outside it.
        bool inside = first < depth;
        const char *slice = inside ? from + 2 * first : from;
#pragma unroll
        for (int i = 0; i < EACH; ++i) copy_or_clear(to + place + u32(i * APART * 128), slice + u64(numbers[i]) * far, inside);
    }
};

// Depths that stand anywhere, of elements adjacent along the lines: a lane finds the places of two
// of a slice's depths, a slice ahead, and lanes hand them round. Lines beyond those that the tile
// has are the first ones again: their results are of no column.
template <int NEAR, class E, class Which, int LINES, int THREADS>
struct Bringer<PickedDepths<Lines<false, NEAR, E>, Which>, LINES, THREADS, false> {
    static constexpr int ACROSS = LINES / 8, EACH = LINES * 8 / THREADS, APART = THREADS / ACROSS;
    const char *from;
    Which which;
    u32 far, place;
    int row, k, next[2];
    DEVICE Bringer(const PickedDepths<Lines<false, NEAR, E>, Which> &picked, int thread, int lines, int k)
        : from(reinterpret_cast<const char *>(picked.lines.from)), which(picked.which), far(2 * picked.lines.far),
          row(thread / ACROSS), k(k) {
        static_assert(APART <= 8 && 8 % APART == 0, "a group of eight rows is brought piece by piece");
        int line = thread % ACROSS * 8;
        place = u32(line / 64 * 8192 + row * 128 + (line / 8 % 8 ^ row) * 16);
        if (line < lines) from += 2 * line;
        look(0);
    }
    DEVICE void look(int first) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int at = first + half * 32 + int(threadIdx.x % 32);
            next[half] = at < k ? which(at) : 0;
        }
    }
    DEVICE void bring(u32 to, int first, u32) {
        int places[2] = {next[0], next[1]}, left = k - first - row;
        look(first + 64);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            // Rows `i * APART + row`, `row` being less than `APART`.
            int depth = i * APART;
            u32 number = u32(__shfl_sync(ALL_LANES, places[depth / 32], depth % 32 + row));
            copy_or_clear(to + (place ^ u32(depth % 8 * 16)) + u32(depth * 128), from + u64(number) * far, depth < left);
        }
    }
};

// A tile of two warpgroups, 64 rows each, and `BRINGERS` warps that bring its operands: one where
// the copy engine brings both, more where lines are gathered. `STAGES` slices are in shared memory
// or on their way. With four or more a slice is multiplied while the next is begun, with fewer
// another block of the processor fills the gaps. `BLOCKS` of a cluster have tiles of the same
// columns: each brings a part of the right operand to all of them.
template <int COLUMNS_, int STAGES, int BRINGERS, bool PAIRS_, int BLOCKS_ = 1> struct Warpgroups {
    static constexpr bool PAIRS = PAIRS_, QUADS = PAIRS, STREAMS = STAGES >= 4;
    static constexpr int ROWS = 128, COLUMNS = COLUMNS_, DEPTH = 64, X = COLUMNS / 8, BLOCKS = BLOCKS_;
    static constexpr int MULTIPLIERS = 256, THREADS = MULTIPLIERS + 32 * BRINGERS;
    static constexpr int UNDER_WAY = STAGES >= 4 ? 1 : 0, AHEAD = STAGES - 1 - UNDER_WAY;
    static constexpr u32 A_BYTES = ROWS * DEPTH * 2, B_BYTES = COLUMNS * DEPTH * 2, STAGE_BYTES = A_BYTES + B_BYTES;

    typedef bf16 Element;
    typedef float Sums[X][4];
    typedef Ring<STAGES, BRINGERS, MULTIPLIERS / 32, BLOCKS> Stages;
    typedef typename Stages::Shared Shared;

    // Goes on from tile to tile: the next one's first slices are brought while this one's results
    // are stored.
    struct Pipe : Stages {
        u32 tiles;
        DEVICE explicit Pipe(Shared &shared) : Stages(shared), tiles(tiles_memory()) {}
        DEVICE u32 tile() const { return tiles + u32(this->stage) * STAGE_BYTES; }
    };

    // Rows and columns of the tile that a thread has; those that bring have rows beyond it.
    static constexpr int OWN_ROWS = 2, OWN_COLUMNS = 2 * X, SHARERS = 4;
    static DEVICE int row(int i) { return int(threadIdx.x) / 32 * 16 + i * 8 + int(threadIdx.x) % 32 / 4; }
    static DEVICE int column(int j) { return j / 2 * 8 + int(threadIdx.x) % 4 * 2 + j % 2; }
    static DEVICE float &at(Sums &sums, int i, int j) { return sums[j / 2][i * 2 + j % 2]; }

    template <bool A_FAST, bool B_FAST, class A, class B>
    static DEVICE void bring(Pipe &pipe, int rows, int columns, int k, int steps, A a, B b) {
        constexpr bool COPIES = !Brought<A>::BOXES || !Brought<B>::BOXES;
        static_assert(COPIES || BRINGERS == 1, "one thread tells the copy engine");
        bool first_lane = threadIdx.x % 32 == 0;
        int thread = int(threadIdx.x) - MULTIPLIERS;
        Bringer<A, ROWS, 32 * BRINGERS, A_FAST> left(a, thread, rows, k);
        Bringer<B, COLUMNS, 32 * BRINGERS, B_FAST> right(b, thread, columns, k);
#pragma unroll 1
        for (int step = 0; step < steps; ++step, pipe.next()) {
            pipe.wait_empty();
            left.bring(pipe.tile(), step * DEPTH, pipe.full());
            if constexpr (BLOCKS > 1) {
                static_assert(!COPIES, "parts that one thread tells the copy engine");
                constexpr int PART = COLUMNS / BLOCKS;
                u32 part = blockIdx.x % BLOCKS * PART;
                if (first_lane) {
                    barrier_expect(pipe.full(), B_BYTES);
                    b.at(int(part), 0).template copy<PART, BLOCKS>(pipe.tile() + A_BYTES + part * 128, step * DEPTH, pipe.full());
                }
            } else right.bring(pipe.tile() + A_BYTES, step * DEPTH, pipe.full());
            if constexpr (COPIES) {
                // A slice is handed over when `AHEAD` later ones are under way.
                copy_commit();
                copy_wait<AHEAD>();
                show_to_matrices();
                __syncwarp();
                if (step >= AHEAD && first_lane) barrier_arrive(pipe.full(AHEAD));
            } else {
                // Lanes that told nobody must have seen the stage empty before it is filled: their
                // parity comes again.
                __syncwarp();
                if (first_lane) barrier_arrive(pipe.full());
            }
        }
        if constexpr (COPIES) {
            copy_wait<0>();
            show_to_matrices();
            __syncwarp();
            for (int back = least(AHEAD, steps); back > 0; --back)
                if (first_lane) barrier_arrive(pipe.full(back));
        }
        __syncwarp();
    }

    // Zeros for the part of a slice after the end of its depth.
    template <int LINES> static DEVICE void cut(u32 tile, int left) {
        for (int i = int(threadIdx.x); i < LINES / 64 * (DEPTH - left) * 8; i += MULTIPLIERS)
            clear_shared(tile + u32(i / ((DEPTH - left) * 8) * 8192) + u32(left * 128 + i % ((DEPTH - left) * 8) * 16));
    }

    template <bool A_FAST, bool B_FAST, class A, class B>
    static DEVICE void consume(Pipe &pipe, Sums &sums, int k, int steps) {
        u32 half = threadIdx.x / 128 * 8192;
#pragma unroll 1
        for (int step = 0; step < steps; ++step, pipe.next()) {
            u32 tile = pipe.tile();
            pipe.wait_full();
            if constexpr (Brought<A>::CUT || Brought<B>::CUT) {
                int left = k - step * DEPTH;
                if (left < DEPTH) {
                    static_assert(!(Brought<A>::CUT && A_FAST) && !(Brought<B>::CUT && B_FAST), "whole rows are cleared");
                    if (Brought<A>::CUT) cut<ROWS>(tile, left);
                    if (Brought<B>::CUT) cut<COLUMNS>(tile + A_BYTES, left);
                    show_to_matrices();
                    meet<MULTIPLIERS>(1);
                }
            }
            matrices_begin();
#pragma unroll
            for (int d = 0; d < DEPTH / 16; ++d) {
                u64 left = tile_at(tile + half + u32(A_FAST ? d * 32 : d * 2048), 8192);
                u64 right = tile_at(tile + A_BYTES + u32(B_FAST ? d * 32 : d * 2048), 8192);
                multiply_tiles<A_FAST, B_FAST>(sums, left, right, step + d);
            }
            matrices_commit();
            matrices_wait<UNDER_WAY>();
            if (step >= UNDER_WAY) pipe.release(UNDER_WAY);
        }
        matrices_wait<0>();
        if (UNDER_WAY > 0) pipe.release(1);
        __syncwarp();
    }

    // A block of a cluster stays until no other writes to its shared memory.
    static DEVICE void part() {
        __syncwarp();
        meet_cluster();
    }

    static DEVICE void clear(Sums &sums) {
#pragma unroll
        for (int j = 0; j < X; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[j][e] = 0.0f;
    }

    // The threads that bring give zeros. Where the copy engine brings both operands they clear them
    // after: sums written before make `ptxas` wait for each `wgmma` of a loop over tiles (its
    // warning C7515). Where they gather, sums cleared after spill.
    template <bool A_FAST, bool B_FAST, class A, class B>
    static DEVICE void multiply(Pipe &pipe, Sums &sums, int rows, int columns, int k, A a, B b) {
        int steps = (k + DEPTH - 1) / DEPTH;
        bool brings = threadIdx.x >= MULTIPLIERS;
        if constexpr (Brought<A>::BOXES && Brought<B>::BOXES) {
            if (!brings && steps > 0) {
                consume<A_FAST, B_FAST, A, B>(pipe, sums, k, steps);
                return;
            }
            if (steps > 0) bring<A_FAST, B_FAST>(pipe, rows, columns, k, steps, a, b);
            clear(sums);
        } else {
            if (steps <= 0 || brings) clear(sums);
            if (steps <= 0) return;
            if (brings) bring<A_FAST, B_FAST>(pipe, rows, columns, k, steps, a, b);
            else consume<A_FAST, B_FAST, A, B>(pipe, sums, k, steps);
        }
    }
};
