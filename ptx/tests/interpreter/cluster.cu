#include "prelude.cuh"

// sums[cluster][column] and the same of the other block: two blocks of a cluster add up the rows of
// a matrix of 64 columns. Each brings half of a stage's 16 rows to both, so that both add up all of
// them; one warp brings, one adds, and stages are empty when the adders of both blocks have read.
constexpr int ROWS = 16, COLUMNS = 64, STAGES = 2, BLOCKS = 2, HALF = ROWS / BLOCKS;
constexpr u32 ROW_BYTES = COLUMNS * 4;

DEVICE u32 place_in(u32 address, u32 block) {
    u32 place;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(address), "r"(block));
    return place;
}

DEVICE void barrier_arrive_there(u32 barrier) {
#ifdef FENCES
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

DEVICE void wait_empty(u32 barrier, u32 parity) {
#ifdef FENCES
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
    asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
#else
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
#endif
}

DEVICE void bring(u32 shared, const TensorMap *map, int row, u32 barrier) {
    u16 blocks = 3;
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                 "[%1, {%2, %3}], [%4], %5;" ::"r"(shared), "l"(map), "r"(0), "r"(row), "r"(barrier), "h"(blocks)
                 : "memory");
}

DEVICE void arrive_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64, 1)
    cluster_sums(const __grid_constant__ TensorMap map, float *sums, int rows) {
    __shared__ __align__(128) float tiles[STAGES][ROWS][COLUMNS];
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
    u32 base = shared_address(tiles), full0 = shared_address(full), empty0 = shared_address(empty), rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    int lane = threadIdx.x % 32, steps = rows / ROWS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full0 + 8 * i, 1);
            barrier_init(empty0 + 8 * i, BLOCKS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    arrive_cluster();
    wait_cluster();

    if (threadIdx.x < 32) {
        for (int step = 0; step < steps; ++step) {
            int stage = step % STAGES;
            wait_empty(empty0 + 8 * stage, step / STAGES % 2 ^ 1);
            __syncwarp();
            if (lane == 0) {
                barrier_expect(full0 + 8 * stage, ROWS * ROW_BYTES);
                u32 tile = base + (stage * ROWS + rank * HALF) * ROW_BYTES;
                bring(tile, &map, step * ROWS + int(rank) * HALF, full0 + 8 * stage);
            }
        }
    } else {
        float sum[2] = {0.0f, 0.0f};
        for (int step = 0; step < steps; ++step) {
            int stage = step % STAGES;
            barrier_wait(full0 + 8 * stage, step / STAGES % 2);
            for (int row = 0; row < ROWS; ++row)
                for (int half = 0; half < 2; ++half) sum[half] += tiles[stage][row][half * 32 + lane];
            __syncwarp();
            if (lane < BLOCKS) barrier_arrive_there(place_in(empty0 + 8 * stage, lane));
        }
        for (int half = 0; half < 2; ++half) sums[blockIdx.x * COLUMNS + half * 32 + lane] = sum[half];
    }
    // No block leaves while the other arrives at its barriers.
    __syncwarp();
    arrive_cluster();
    wait_cluster();
}
