// Attention over sources in depth: each token reads a few rows of its own by one query of all
// tokens, so what counts is to read every source once from memory. A warp has a token, its lanes
// the elements of a source; what a lane writes it alone reads again.
#pragma once
#include "prelude.cuh"

template <int TOKENS_, int WIDTH_> struct Sources {
    static constexpr int TOKENS = TOKENS_, WIDTH = WIDTH_;
};

template <class S> DEVICE const float *source(const float *sources, const float *own, int r, int row, int token) {
    return r < row ? sources + (i64(r) * S::TOKENS + token) * S::WIDTH : own;
}

// The score of a source, and the reciprocal root of its mean square.
template <class S> DEVICE float source_score(const float *q, const float *v, float eps, float &root) {
    float along = 0.0f, square = 0.0f;
    for (int i = int(threadIdx.x % 32); i < S::WIDTH; i += 32) {
        float x = v[i];
        along = fmaf(q[i], x, along);
        square = fmaf(x, x, square);
    }
    root = rsqrtf(lanes<Sum, 32>(square, ALL_LANES) / float(S::WIDTH) + eps);
    return lanes<Sum, 32>(along, ALL_LANES) * root;
}

template <class S> DEVICE float source_inner(const float *d, const float *v) {
    float sum = 0.0f;
    for (int i = int(threadIdx.x % 32); i < S::WIDTH; i += 32) sum = fmaf(d[i], v[i], sum);
    return lanes<Sum, 32>(sum, ALL_LANES);
}

template <class S>
DEVICE void read_sources(const float *sources, const float *x, i64 x_stride, const float *q, int row, float *u, float eps) {
    int token = int((i64(blockIdx.x) * blockDim.x + threadIdx.x) / 32), lane = int(threadIdx.x % 32);
    if (token >= S::TOKENS) return;
    const float *own = x + i64(token) * x_stride;
    float *out = u + i64(token) * S::WIDTH;
    float most = -infinity(), sum = 0.0f;
    for (int r = 0; r <= row; ++r) {
        const float *v = source<S>(sources, own, r, row, token);
        float root, s = source_score<S>(q, v, eps, root), high = Largest::join(most, s);
        float shrink = expf(most - high), p = expf(s - high);
        most = high;
        sum = fmaf(sum, shrink, p);
        for (int i = lane; i < S::WIDTH; i += 32) out[i] = r == 0 ? p * v[i] : fmaf(p, v[i], out[i] * shrink);
    }
    for (int i = lane; i < S::WIDTH; i += 32) out[i] /= sum;
}

// Scores are computed twice: once for the sum of the softmax, once for the gradients.
template <class S>
DEVICE void read_sources_grad(const float *sources, const float *x, i64 x_stride, const float *q, int row, const float *du,
                              float *dx, float *dq, float *dsources, float eps) {
    int token = int((i64(blockIdx.x) * blockDim.x + threadIdx.x) / 32), lane = int(threadIdx.x % 32);
    if (token >= S::TOKENS) return;
    const float *own = x + i64(token) * x_stride, *d = du + i64(token) * S::WIDTH;
    float *query = dq + i64(token) * S::WIDTH, *last = dx + i64(token) * S::WIDTH;
    float most = -infinity(), sum = 0.0f, along = 0.0f;
    for (int r = 0; r <= row; ++r) {
        const float *v = source<S>(sources, own, r, row, token);
        float root, s = source_score<S>(q, v, eps, root), high = Largest::join(most, s);
        float shrink = expf(most - high), p = expf(s - high);
        most = high;
        sum = fmaf(sum, shrink, p);
        along = fmaf(p, source_inner<S>(d, v), along * shrink);
    }
    along /= sum;
    for (int r = 0; r <= row; ++r) {
        const float *v = source<S>(sources, own, r, row, token);
        float root, s = source_score<S>(q, v, eps, root), p = expf(s - most) / sum;
        float ds = p * (source_inner<S>(d, v) - along) * root, back = ds * s * root / float(S::WIDTH);
        float *to = r < row ? dsources + (i64(r) * S::TOKENS + token) * S::WIDTH : last;
        for (int i = lane; i < S::WIDTH; i += 32) {
            float x = v[i], part = fmaf(p, d[i], fmaf(ds, q[i], -back * x));
            to[i] = r < row ? to[i] + part : part;
            query[i] = r == 0 ? ds * x : fmaf(ds, x, query[i]);
        }
    }
}
