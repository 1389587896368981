#include "prelude.cuh"

// C[m, n] = A[m, k] B[k, n] in bf16 on Hopper: a block makes a tile of 128 x 128. One warpgroup
// brings tiles by TMA into a ring of stages, two multiply 64 rows each by wgmma; mbarriers say when
// a stage is full and when it is empty. The result leaves by TMA too. Edges need no care: TMA fills
// with zeros and cuts off.
constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 64, STAGES = 3;
constexpr u32 A_BYTES = ROWS * DEPTH * 2, B_BYTES = DEPTH * COLUMNS * 2, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr u32 HALF_B = DEPTH * 64 * 2;

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void tensor_load(u32 shared, const TensorMap *map, int x, int y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared), "l"(map), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}

DEVICE void tensor_store(const TensorMap *map, int x, int y, u32 shared) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x), "r"(y),
                 "r"(shared)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Descriptor of a tile with a swizzle of 128 bytes: the stride is that between groups of eight
// rows, the leading one that between blocks of 64 columns of a transposed tile.
DEVICE u64 descriptor(u32 shared, u32 leading, u32 stride) {
    return u64(shared >> 4 & 0x3fff) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
}

#define R8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
              "+f"(d[i + 6]), "+f"(d[i + 7])

DEVICE void product(float (&d)[64], u64 a, u64 b, int accumulate) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p, 1, 1, 0, 1;\n"
                 "}"
                 : R8(0), R8(8), R8(16), R8(24), R8(32), R8(40), R8(48), R8(56)
                 : "l"(a), "l"(b), "r"(accumulate));
}

extern "C" __global__ void __launch_bounds__(384, 1)
    hopper_gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                const __grid_constant__ TensorMap map_c, int k) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
    u32 base = shared_address(shared), full0 = shared_address(full), empty0 = shared_address(empty);
    int steps = (k + DEPTH - 1) / DEPTH, group = threadIdx.x / 128;
    int row0 = blockIdx.y * ROWS, column0 = blockIdx.x * COLUMNS;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full0 + 8 * i, 1);
            barrier_init(empty0 + 8 * i, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (int step = 0; step < steps; ++step) {
                int stage = step % STAGES;
                // The first round finds every stage empty: the phase before the first counts as
                // over.
                barrier_wait(empty0 + 8 * stage, step / STAGES % 2 ^ 1);
                u32 tile = base + stage * STAGE_BYTES;
                barrier_expect(full0 + 8 * stage, STAGE_BYTES);
                tensor_load(tile, &map_a, step * DEPTH, row0, full0 + 8 * stage);
                tensor_load(tile + A_BYTES, &map_b, column0, step * DEPTH, full0 + 8 * stage);
                tensor_load(tile + A_BYTES + HALF_B, &map_b, column0 + 64, step * DEPTH, full0 + 8 * stage);
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int half = group - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float d[64];
    for (int step = 0; step < steps; ++step) {
        int stage = step % STAGES;
        barrier_wait(full0 + 8 * stage, step / STAGES % 2);
        u32 tile = base + stage * STAGE_BYTES;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int i = 0; i < DEPTH / 16; ++i) {
            u64 a = descriptor(tile + half * (A_BYTES / 2) + i * 32, 16, 1024);
            u64 b = descriptor(tile + A_BYTES + i * 2048, HALF_B, 1024);
            product(d, a, b, step + i > 0);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (threadIdx.x % 128 == 0) barrier_arrive(empty0 + 8 * stage);
    }

    // All stages are read; the result uses the place of the ring's first tiles. The other half may
    // still multiply from there, so both meet before they write.
    asm volatile("bar.sync 3, 256;" ::: "memory");
    u8 *out = shared + half * 64 * COLUMNS * 2;
    for (int i = 0; i < 64; i += 2) {
        int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2;
        *(u32 *)(out + (row * COLUMNS + column) * 2) = pack(d[i], d[i + 1]);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
    if (threadIdx.x % 128 == 0) {
        tensor_store(&map_c, column0, row0 + half * 64, shared_address(out));
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}
