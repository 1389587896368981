// Routing: which experts a row chooses, and the slots sorted by expert.
#pragma once
#include "prelude.cuh"

// NaN is never worth choosing.
DEVICE float worth(float z) { return z == z ? z : -infinity(); }

// Whether `(a, i)` comes before `(b, j)`: larger first, ties to the lower index.
DEVICE bool before(float a, int i, float b, int j) { return a > b || (a == b && i < j); }

// The `K` best of each row, best first. A warp has a row and looks `K` times for the best one after
// the last: no list is kept, so any `K` works. A row of up to 1024 is read once, into registers.
template <int ROWS, int EXPERTS, int K> DEVICE void route(const float *z, int *chosen) {
    int row = int(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32), lane = int(threadIdx.x % 32);
    if (row >= ROWS) return;
    const float *values = z + i64(row) * EXPERTS;
    constexpr int EACH = (EXPERTS + 31) / 32;
    constexpr bool KEPT = EACH <= 32;
    float kept[KEPT ? EACH : 1];
    if constexpr (KEPT) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) kept[i] = lane + i * 32 < EXPERTS ? worth(values[lane + i * 32]) : 0.0f;
    }
    float last = infinity();
    int last_index = -1;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
        float best = -infinity();
        int index = EXPERTS;
        auto look = [&](int e, float value) {
            bool left = k == 0 || before(last, last_index, value, e);
            if (left && (index == EXPERTS || before(value, e, best, index))) {
                best = value;
                index = e;
            }
        };
        if constexpr (KEPT) {
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (lane + i * 32 < EXPERTS) look(lane + i * 32, kept[i]);
        } else {
            for (int e = lane; e < EXPERTS; e += 32) look(e, worth(values[e]));
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            float other = __shfl_xor_sync(ALL_LANES, best, distance);
            int other_index = __shfl_xor_sync(ALL_LANES, index, distance);
            if (other_index < EXPERTS && (index == EXPERTS || before(other, other_index, best, index))) {
                best = other;
                index = other_index;
            }
        }
        if (lane == 0) chosen[i64(row) * K + k] = index;
        last = best;
        last_index = index;
    }
}

// A stable counting sort in four passes: count each chunk's choices, add the chunks up for each
// group, add the groups up, and let every slot find its place. No-ops, choices of `EXPERTS` or
// more, are one more group after the others. A warp goes through a chunk 32 slots at a time, in
// order, so slots of a group stay in order; its counts of each group are in shared memory while it
// does, unless the groups are too many.
constexpr int CHUNK = 256, NEAR_GROUPS = 8192;

// The groups of the chunk's slots, a lane's one after another; `GROUPS` beyond the last slot.
template <int SLOTS, int GROUPS, class Of> DEVICE void groups_of_chunk(const Of &of, int (&groups)[CHUNK / 32]) {
#pragma unroll
    for (int i = 0; i < CHUNK / 32; ++i) {
        int slot = int(blockIdx.x) * CHUNK + i * 32 + int(threadIdx.x);
        groups[i] = slot < SLOTS ? of(slot) : GROUPS;
    }
}

// `counts[chunk][group]`, where `of(slot)` is a slot's group.
template <int SLOTS, int GROUPS, class Of> DEVICE void count_chunk(const Of &of, int *counts) {
    constexpr bool NEAR = GROUPS <= NEAR_GROUPS;
    __shared__ int near[NEAR ? GROUPS : 1];
    int lane = int(threadIdx.x), groups[CHUNK / 32];
    int *far = counts + i64(blockIdx.x) * GROUPS, *mine = NEAR ? near : far;
    groups_of_chunk<SLOTS, GROUPS>(of, groups);
    for (int e = lane; e < GROUPS; e += 32) mine[e] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / 32; ++i) {
        u32 same = __match_any_sync(ALL_LANES, groups[i]);
        if (groups[i] < GROUPS && lane == __ffs(same) - 1) mine[groups[i]] += __popc(same);
        __syncwarp();
    }
    if (NEAR)
        for (int e = lane; e < GROUPS; e += 32) far[e] = near[e];
}

// Calls `put(slot, place)` for every slot of the chunk.
template <int SLOTS, int GROUPS, class Of, class Put>
DEVICE void place_chunk(const Of &of, int *counts, const int *offsets, const Put &put) {
    constexpr bool NEAR = GROUPS <= NEAR_GROUPS;
    __shared__ int near[NEAR ? GROUPS : 1];
    int lane = int(threadIdx.x), groups[CHUNK / 32];
    int *far = counts + i64(blockIdx.x) * GROUPS;
    groups_of_chunk<SLOTS, GROUPS>(of, groups);
    if (NEAR)
        for (int e = lane; e < GROUPS; e += 32) near[e] = offsets[e] + far[e];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / 32; ++i) {
        int group = groups[i], slot = int(blockIdx.x) * CHUNK + i * 32 + lane, begun = 0;
        u32 same = __match_any_sync(ALL_LANES, group);
        int leader = __ffs(same) - 1;
        if (group < GROUPS && lane == leader) {
            if (NEAR) {
                begun = near[group];
                near[group] = begun + __popc(same);
            } else {
                begun = offsets[group] + far[group];
                far[group] += __popc(same);
            }
        }
        begun = __shfl_sync(ALL_LANES, begun, leader);
        if (group < GROUPS) put(slot, begun + __popc(same & ((1u << lane) - 1u)));
        __syncwarp();
    }
}

template <int EXPERTS> DEVICE int group_of(int choice) { return u32(choice) < u32(EXPERTS) ? choice : EXPERTS; }

template <int SLOTS, int EXPERTS> DEVICE void group_count(const int *chosen, int *counts) {
    count_chunk<SLOTS, EXPERTS + 1>([&](int slot) { return group_of<EXPERTS>(chosen[slot]); }, counts);
}

// Counts become how many of the group are in chunks before; `totals[group]`. A warp has a group.
template <int CHUNKS, int EXPERTS> DEVICE void group_chunks(int *counts, int *totals) {
    int group = int(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32), lane = int(threadIdx.x % 32);
    if (group > EXPERTS) return;
    int total = 0;
    for (int first = 0; first < CHUNKS; first += 32) {
        int chunk = first + lane;
        int *at = counts + i64(chunk) * (EXPERTS + 1) + group;
        int count = chunk < CHUNKS ? *at : 0, sum = count;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            int other = __shfl_up_sync(ALL_LANES, sum, distance);
            if (lane >= distance) sum += other;
        }
        if (chunk < CHUNKS) *at = total + sum - count;
        total += __shfl_sync(ALL_LANES, sum, 31);
    }
    if (lane == 0) totals[group] = total;
}

// `offsets`, from the totals; one warp.
template <int EXPERTS> DEVICE void group_offsets(const int *totals, int *offsets) {
    int lane = int(threadIdx.x), begun = 0;
    for (int first = 0; first <= EXPERTS; first += 32) {
        int group = first + lane, count = group <= EXPERTS ? totals[group] : 0, sum = count;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            int other = __shfl_up_sync(ALL_LANES, sum, distance);
            if (lane >= distance) sum += other;
        }
        if (group <= EXPERTS) offsets[group] = begun + sum - count;
        begun += __shfl_sync(ALL_LANES, sum, 31);
    }
}

// `order` and `inverse`; the counts are used up.
template <int SLOTS, int EXPERTS>
DEVICE void group_place(const int *chosen, int *counts, const int *offsets, int *order, int *inverse) {
    place_chunk<SLOTS, EXPERTS + 1>([&](int slot) { return group_of<EXPERTS>(chosen[slot]); }, counts, offsets,
                                    [&](int slot, int place) {
                                        order[place] = slot;
                                        inverse[slot] = place;
                                    });
}

// As many slots of each group as fill tiles of `TILE`, the rest with no expert (`NONE`). Of a row's
// `K` choices those from number `OWN` on are spare: they fill a tile that others fill by half.
template <int SLOTS, int EXPERTS, int K, int OWN, int TILE, int NONE>
DEVICE void round_groups(const float *score, const int *chosen, const int *order, const int *offsets, int *kept,
                         int *status, int launch) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= SLOTS) return;
    int slot = order[at];
    if (u32(slot) >= u32(SLOTS)) {
        report(status, launch);
        return;
    }
    int expert = chosen[slot];
    if (u32(expert) >= u32(EXPERTS)) {
        kept[slot] = expert;
        return;
    }
    int begin = offsets[expert], end = offsets[expert + 1];
    if (begin < 0 || end > SLOTS) {
        report(status, launch);
        return;
    }
    // Slots of the group, spare ones among them, and those of the same kind before this one.
    bool spare = slot % K >= OWN;
    float own_score = worth(score[slot]);
    int all = 0, others = 0, ahead = 0;
#pragma unroll 4
    for (int i = begin; i < end; ++i) {
        int s = order[i];
        if (u32(s) >= u32(SLOTS)) continue;
        bool other = s % K >= OWN;
        ++all;
        others += other;
        ahead += other == spare && before(worth(score[s]), s, own_score, slot);
    }
    int own = all - others, over = own % TILE, missing = TILE - over;
    bool filled = over > 0 && missing <= over && missing <= others;
    int taken = spare ? (filled ? missing : 0) : (filled ? own : own - over);
    kept[slot] = ahead < taken ? expert : NONE;
}

// Adds the size of every group to its count.
template <int EXPERTS> DEVICE void add_counts(const int *offsets, float *counts) {
    int e = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (e < EXPERTS) counts[e] += float(offsets[e + 1] - offsets[e]);
}
