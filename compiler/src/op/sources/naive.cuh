// functions
#define SOURCE(r, t) ((sources) + ((r) * ROWS + (t)) * WIDTH)
DEVICE float dot(const float *x, const float *y) {
    float sum = 0.0f;
    for (i64 e = 0; e < WIDTH; ++e) sum = fmaf(x[e], y[e], sum);
    return sum;
}
DEVICE float root(const float *v) { return 1.0f / sqrtf(dot(v, v) / float(WIDTH) + EPS); }
DEVICE float score(const float *q, const float *v) { return dot(q, v) * root(v); }
// The last source is the row of x.
DEVICE const float *source(const float *sources, const float *own, i64 r, i64 row, i64 t) {
    return r < row ? SOURCE(r, t) : own;
}
DEVICE float largest(const float *sources, const float *own, const float *q, i64 row, i64 t) {
    float most = -infinity();
    for (i64 r = 0; r <= row; ++r) most = fmaxf(most, score(q, source(sources, own, r, row, t)));
    return most;
}
DEVICE float sum_of(const float *sources, const float *own, const float *q, i64 row, i64 t, float most) {
    float sum = 0.0f;
    for (i64 r = 0; r <= row; ++r) sum += expf(score(q, source(sources, own, r, row, t)) - most);
    return sum;
}
// pass forward: an element of u
i64 e = at % WIDTH, t = at / WIDTH;
const float *own = x + t * x_stride;
float most = largest(sources, own, q, row, t), sum = sum_of(sources, own, q, row, t, most), out = 0.0f;
for (i64 r = 0; r <= row; ++r) {
    const float *v = source(sources, own, r, row, t);
    out = fmaf(expf(score(q, v) - most) / sum, v[e], out);
}
u[at] = out;
// pass backward: an element of dx, of dq and of every row read of dsources
i64 e = at % WIDTH, t = at / WIDTH;
const float *own = x + t * x_stride, *d = du + t * WIDTH;
float most = largest(sources, own, q, row, t), sum = sum_of(sources, own, q, row, t, most), along = 0.0f;
for (i64 r = 0; r <= row; ++r) {
    const float *v = source(sources, own, r, row, t);
    along = fmaf(expf(score(q, v) - most) / sum, dot(d, v), along);
}
float query = 0.0f;
for (i64 r = 0; r <= row; ++r) {
    const float *v = source(sources, own, r, row, t);
    float back = root(v), p = expf(score(q, v) - most) / sum, ds = p * (dot(d, v) - along);
    float part = p * d[e] + ds * back * (q[e] - score(q, v) * back * v[e] / float(WIDTH));
    query = fmaf(ds * back, v[e], query);
    if (r < row) {
        (dsources + (r * ROWS + t) * WIDTH)[e] += part;
    } else {
        dx[at] = part;
    }
}
dq[at] = query;
