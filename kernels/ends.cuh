// The loss: cross-entropy of logits in memory, and the head fused with it, where logits exist a
// tile at a time.
#pragma once
#include "product.cuh"

// A running `Σ e^x` relative to its largest exponent.
struct Exponents {
    float most, sum;

    static DEVICE Exponents none() { return {-infinity(), 0.0f}; }

    static DEVICE Exponents join(Exponents a, Exponents b) {
        float high = Largest::join(a.most, b.most);
        if (high == -infinity()) return a;
        return {high, fmaf(a.sum, expf(a.most - high), b.sum * expf(b.most - high))};
    }

    DEVICE float log() const { return most == -infinity() ? most : most + logf(sum); }
};

// Whether there is a target; tells of one beyond the classes.
template <int VOCAB> DEVICE bool is_target(int target, int *status, int launch) {
    if (target >= VOCAB) report(status, launch);
    return target >= 0 && target < VOCAB;
}

// `T` threads, a warp or the block, have a row, and read it once, `N` classes at a time.
template <int ROWS, int VOCAB, int T, int N, class E>
DEVICE void cross_entropy(const E *logits, const int *targets, float *nll, float *lse, int *status, int launch) {
    __shared__ float buffer[T / 32];
    int row = int(blockIdx.x * (blockDim.x / T) + threadIdx.x / T), t = int(threadIdx.x % T);
    if (row >= ROWS) return;
    const E *x = logits + i64(row) * VOCAB;
    float most = -infinity(), sum = 0.0f;
#pragma unroll 2
    for (int i = t * N; i < VOCAB; i += T * N) {
        Floats<N> z = load<N>(x + i);
        float high = Largest::join(most, z.template all<Largest>());
        if (high == -infinity()) {
            // A NaN stays in the sum.
#pragma unroll
            for (int j = 0; j < N; ++j) sum += z.x[j] == z.x[j] ? 0.0f : z.x[j];
            continue;
        }
        Floats<N> terms = expf(z - high);
        sum = fmaf(sum, expf(most - high), terms.template all<Sum>());
        most = high;
    }
    float high = threads<Largest, T>(most, buffer);
    sum = threads<Sum, T>(high == -infinity() ? 0.0f : sum * expf(most - high), buffer);
    if (t > 0) return;
    float total = high == -infinity() ? high : high + logf(sum);
    int target = targets[row];
    lse[row] = total;
    nll[row] = is_target<VOCAB>(target, status, launch) ? total - to_float(x[target]) : 0.0f;
}

template <int ROWS, int VOCAB, int N, class E>
DEVICE void cross_entropy_grad(const E *logits, const int *targets, const float *lse, const float *d, E *dlogits,
                               int *status, int launch) {
    i64 at = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * N, row = at / VOCAB;
    if (row >= ROWS) return;
    int target = targets[row];
    bool valid = is_target<VOCAB>(target, status, launch);
    Floats<N> p = 0.0f;
    if (valid) {
        float scale = d[row];
        int hit = target - int(at % VOCAB);
        p = scale * expf(load<N>(logits + at) - lse[row]);
#pragma unroll
        for (int i = 0; i < N; ++i) p.x[i] = i == hit ? p.x[i] - scale : p.x[i];
    }
    store(dlogits + at, p);
}

// `parts[part][row]`: largest logit, sum, and minus the target's logit, over the classes of the
// part. Rows in tiles, and the classes in parts, so that few rows still keep a GPU busy.
template <class T, int ROWS, int VOCAB, int WIDTH, int PART, bool CAPPED, class X, class W>
DEVICE void head_loss(const X &x, const W &w, const int *targets, float *parts, float cap, int *status,
                      int launch) {
    __shared__ typename T::Shared shared;
    constexpr int TILES = (ROWS + T::ROWS - 1) / T::ROWS;
    u32 block = blockIdx.x;
    int row = int(take(block, TILES)) * T::ROWS, part = int(block), rows = least(T::ROWS, ROWS - row);
    int end = least(VOCAB, (part + 1) * PART);
    Exponents sums[T::OWN_ROWS];
    float hit[T::OWN_ROWS];
    int wanted[T::OWN_ROWS];
    bool leader = threadIdx.x % T::SHARERS == 0;
    typename T::Pipe pipe(shared);
#pragma unroll
    for (int i = 0; i < T::OWN_ROWS; ++i) {
        sums[i] = Exponents::none();
        hit[i] = 0.0f;
        wanted[i] = T::row(i) < rows ? targets[row + T::row(i)] : -1;
        if (part == 0 && leader) is_target<VOCAB>(wanted[i], status, launch);
    }
    for (int column = part * PART; column < end; column += T::COLUMNS) {
        int columns = least(T::COLUMNS, end - column);
        typename T::Sums logits;
        T::template multiply<true, true>(pipe, logits, rows, columns, WIDTH, operand<true>(x, WIDTH).at(row, 0),
                                         operand<true>(w, WIDTH).at(column, 0));
        int left = columns - T::column(0);
#pragma unroll
        for (int i = 0; i < T::OWN_ROWS; ++i) {
            int target = wanted[i] - column - T::column(0);
            float high = sums[i].most, sum = 0.0f;
#pragma unroll
            for (int j = 0; j < T::OWN_COLUMNS; ++j) {
                int at = T::column(j) - T::column(0);
                float &logit = T::at(logits, i, j);
                logit = at >= left ? -infinity() : CAPPED ? cap * tanhf(logit / cap) : logit;
                high = Largest::join(high, logit);
                if (at == target && at < left) hit[i] = -logit;
            }
            if (high == -infinity()) continue;
#pragma unroll
            for (int j = 0; j < T::OWN_COLUMNS; ++j) sum += power_of_two((T::at(logits, i, j) - high) * LOG2_E);
            sums[i] = {high, fmaf(sums[i].sum, power_of_two((sums[i].most - high) * LOG2_E), sum)};
        }
    }
    // The threads of a row of the tile are adjacent, and at most a warp.
    static_assert(T::SHARERS > 0 && T::SHARERS <= 32, "a row of the tile within a warp");
    u32 mask = group_mask<T::SHARERS>();
#pragma unroll
    for (int i = 0; i < T::OWN_ROWS; ++i) {
#pragma unroll
        for (int distance = T::SHARERS / 2; distance > 0; distance /= 2) {
            Exponents other = {__shfl_xor_sync(mask, sums[i].most, distance), __shfl_xor_sync(mask, sums[i].sum, distance)};
            // Both lanes join in the same order, so both have the same bits.
            bool upper = threadIdx.x & distance;
            sums[i] = upper ? Exponents::join(other, sums[i]) : Exponents::join(sums[i], other);
        }
        hit[i] = lanes<Sum, T::SHARERS>(hit[i], mask);
        if (leader && T::row(i) < rows) {
            float *to = parts + (i64(part) * ROWS + row + T::row(i)) * 3;
            to[0] = sums[i].most;
            to[1] = sums[i].sum;
            to[2] = hit[i];
        }
    }
}

template <int ROWS, int PARTS>
DEVICE void head_loss_join(const float *parts, const int *targets, float *nll, float *lse) {
    int row = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= ROWS) return;
    Exponents total = Exponents::none();
    float hit = 0.0f;
    for (int part = 0; part < PARTS; ++part) {
        const float *from = parts + (i64(part) * ROWS + row) * 3;
        total = Exponents::join(total, {from[0], from[1]});
        hit += from[2];
    }
    lse[row] = total.log();
    nll[row] = targets[row] < 0 ? 0.0f : total.log() + hit;
}

// The cotangents of the logits of classes `first..first + PART`: a product whose results go through
// the softmax at once.
template <class T, int ROWS, int VOCAB, int WIDTH, int PART, bool CAPPED, class X, class W, class E>
DEVICE void head_grad_logits(const X &x, const W &w, const int *targets, const float *lse, const float *d, E *dlogits,
                             float cap, int iteration, int *status, int launch) {
    __shared__ typename T::Shared shared;
    u32 block = blockIdx.x;
    int first = iteration * PART, part = least(PART, VOCAB - first);
    int column = int(take(block, (PART + T::COLUMNS - 1) / T::COLUMNS)) * T::COLUMNS, row = int(block) * T::ROWS;
    int rows = least(T::ROWS, ROWS - row), columns = least(T::COLUMNS, part - column);
    if (columns <= 0) return;
    typename T::Sums logits;
    typename T::Pipe pipe(shared);
    T::template multiply<true, true>(pipe, logits, rows, columns, WIDTH, operand<true>(x, WIDTH).at(row, 0),
                                     operand<true>(w, WIDTH).at(first + column, 0));
    each<T>(logits, rows, columns, [&](int i, int j) {
        int target = targets[row + i];
        bool valid = is_target<VOCAB>(target, status, launch);
        float scale = d[row + i], total = lse[row + i];
        int hit = target - first - column - j;
        return put<false>(dlogits + i64(row + i) * PART + column + j, [=](int at, float logit) {
            float t = CAPPED ? tanhf(logit / cap) : 0.0f, capped = CAPPED ? cap * t : logit;
            float p = scale * expf(capped - total) - (at == hit ? scale : 0.0f);
            return valid ? p * (1.0f - t * t) : 0.0f;
        });
    });
}

// `dx (+)= dlogits · w` over these classes; the first time overwrites.
template <class T, int ROWS, int VOCAB, int WIDTH, int PART, class D, class W>
DEVICE void head_grad_x(const D &dlogits, const W &w, float *dx, int iteration) {
    __shared__ typename T::Shared shared;
    u32 block = blockIdx.x;
    int first = iteration * PART, part = least(PART, VOCAB - first);
    int column = int(take(block, (WIDTH + T::COLUMNS - 1) / T::COLUMNS)) * T::COLUMNS, row = int(block) * T::ROWS;
    int rows = least(T::ROWS, ROWS - row), columns = least(T::COLUMNS, WIDTH - column);
    typename T::Sums sums;
    typename T::Pipe pipe(shared);
    T::template multiply<true, false>(pipe, sums, rows, columns, part, operand<true>(dlogits, PART).at(row, 0),
                                      operand<false>(w, WIDTH).at(column, first));
    auto to = [&](int i, int j) { return dx + i64(row + i) * WIDTH + column + j; };
    if (iteration > 0) each<T>(sums, rows, columns, [&](int i, int j) { return put<true>(to(i, j)); });
    else each<T>(sums, rows, columns, [&](int i, int j) { return put<false>(to(i, j)); });
}

// `dw[classes] (+)= dlogitsᵀ · x`
template <class T, int ROWS, int VOCAB, int WIDTH, int PART, bool ADD, class D, class X>
DEVICE void head_grad_w(const D &dlogits, const X &x, float *dw, int iteration) {
    __shared__ typename T::Shared shared;
    u32 block = blockIdx.x;
    int first = iteration * PART, part = least(PART, VOCAB - first);
    int column = int(take(block, (WIDTH + T::COLUMNS - 1) / T::COLUMNS)) * T::COLUMNS, row = int(block) * T::ROWS;
    int rows = least(T::ROWS, part - row), columns = least(T::COLUMNS, WIDTH - column);
    if (rows <= 0) return;
    typename T::Sums sums;
    typename T::Pipe pipe(shared);
    T::template multiply<false, false>(pipe, sums, rows, columns, ROWS, operand<false>(dlogits, PART).at(row, 0),
                                       operand<false>(x, WIDTH).at(column, 0));
    each<T>(sums, rows, columns, [&](int i, int j) { return put<ADD>(dw + i64(first + row + i) * WIDTH + column + j); });
}
