// functions
// A window of 0 hides nothing.
DEVICE bool near(i64 query, i64 key) { return key >= 0 && key <= query && (WINDOW == 0 || query - key < WINDOW); }
DEVICE float dot(const Float0 *x, const Float0 *y) {
    float sum = 0.0f;
    for (i64 e = 0; e < SIZE; ++e) sum = fmaf(value(x[e]), value(y[e]), sum);
    return sum;
}
DEVICE float score(const Float0 *q, const Float0 *k) {
    float s = dot(q, k) * SCALE;
    return CAPPED ? SOFTCAP * tanhf(s / SOFTCAP) : s;
}
DEVICE float probability(const Float0 *q, const Float0 *k, float lse) {
    return lse == -infinity() ? 0.0f : expf(score(q, k) - lse);
}
// The cotangent of the product of a query and a key.
DEVICE float cotangent(const Float0 *q, const Float0 *k, const Float0 *v, const Float0 *o, const Float0 *d, float lse,
                       float dlse) {
    float t = CAPPED ? score(q, k) / SOFTCAP : 0.0f;
    return probability(q, k, lse) * (dot(d, v) - dot(d, o) + dlse) * SCALE * (1.0f - t * t);
}
#if LOG
#define LOG_COTANGENT(row) dlse[row]
#else
#define LOG_COTANGENT(row) 0.0f
#endif
#define GROUP (HEADS / KV_HEADS)
#if POSITIONS
#define QUERY(b, i) query_positions[(b) * QUERIES + (i)]
#define KEY(b, j) key_positions[(b) * KEYS + (j)]
#else
#define QUERY(b, i) (i)
#define KEY(b, j) (j)
#endif
#if SEGMENTS
#define TOGETHER(b, i, j) (segments[(b) * QUERIES + (i)] == segments[(b) * QUERIES + (j)])
#else
#define TOGETHER(b, i, j) true
#endif
#define SEES(b, i, j) (near(QUERY(b, i), KEY(b, j)) && TOGETHER(b, i, j))
#define OF_QUERY(x, b, i, h) ((x) + ((b) * QUERIES + (i)) * x##_stride + (h) * SIZE)
#define OF_KEY(x, b, j, g) ((x) + ((b) * KEYS + (j)) * x##_stride + (g) * SIZE)
// pass forward: an element of o
i64 e = at % SIZE, h = at / SIZE % HEADS, i = at / (SIZE * HEADS) % QUERIES, b = at / (SIZE * HEADS * QUERIES);
float most = -infinity();
for (i64 j = 0; j < KEYS; ++j) {
    if (SEES(b, i, j)) most = fmaxf(most, score(OF_QUERY(q, b, i, h), OF_KEY(k, b, j, h / GROUP)));
}
float sum = 0.0f, out = 0.0f;
for (i64 j = 0; j < KEYS; ++j) {
    if (!SEES(b, i, j)) continue;
    float p = expf(score(OF_QUERY(q, b, i, h), OF_KEY(k, b, j, h / GROUP)) - most);
    sum += p;
    out = fmaf(p, value(OF_KEY(v, b, j, h / GROUP)[e]), out);
}
put(o + at, sum > 0.0f ? out / sum : 0.0f);
if (e == 0) lse[at / SIZE] = sum > 0.0f ? most + logf(sum) : -infinity();
// pass queries: an element of dq
i64 e = at % SIZE, h = at / SIZE % HEADS, i = at / (SIZE * HEADS) % QUERIES, b = at / (SIZE * HEADS * QUERIES);
float sum = 0.0f;
for (i64 j = 0; j < KEYS; ++j) {
    if (!SEES(b, i, j)) continue;
    float ds = cotangent(OF_QUERY(q, b, i, h), OF_KEY(k, b, j, h / GROUP), OF_KEY(v, b, j, h / GROUP),
                         OF_QUERY(o, b, i, h), OF_QUERY(d, b, i, h), lse[at / SIZE], LOG_COTANGENT(at / SIZE));
    sum = fmaf(ds, value(OF_KEY(k, b, j, h / GROUP)[e]), sum);
}
put(OF_QUERY(dq, b, i, h) + e, sum);
// pass keys: an element of dk and of dv
i64 e = at % SIZE, g = at / SIZE % KV_HEADS, j = at / (SIZE * KV_HEADS) % KEYS, b = at / (SIZE * KV_HEADS * KEYS);
float of_key = 0.0f, of_value = 0.0f;
for (i64 h = g * GROUP; h < (g + 1) * GROUP; ++h) {
    for (i64 i = 0; i < QUERIES; ++i) {
        if (!SEES(b, i, j)) continue;
        i64 row = (b * QUERIES + i) * HEADS + h;
        float norm = lse[row];
        float ds = cotangent(OF_QUERY(q, b, i, h), OF_KEY(k, b, j, g), OF_KEY(v, b, j, g), OF_QUERY(o, b, i, h),
                             OF_QUERY(d, b, i, h), norm, LOG_COTANGENT(row));
        float p = probability(OF_QUERY(q, b, i, h), OF_KEY(k, b, j, g), norm);
        of_key = fmaf(ds, value(OF_QUERY(q, b, i, h)[e]), of_key);
        of_value = fmaf(p, value(OF_QUERY(d, b, i, h)[e]), of_value);
    }
}
put(OF_KEY(dk, b, j, g) + e, of_key);
put(OF_KEY(dv, b, j, g) + e, of_value);
