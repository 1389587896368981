// A window of 0 hides nothing.
DEVICE bool near(i64 query, i64 key) { return key >= 0 && key <= query && (WINDOW == 0 || query - key < WINDOW); }
#if LOG
#define LOG_COTANGENT(row) dlse[row]
#else
#define LOG_COTANGENT(row) 0.0f
#endif
#define GROUP (HEADS / KV_HEADS)
// Blocks that no key of a position is in have negative numbers.
#if AMONG
DEVICE bool among(const int *chosen, i64 query, i64 h, i64 key) {
    const int *list = chosen + (query * CHOICES + h / (HEADS / CHOICES)) * COUNT;
    for (i64 n = 0; n < COUNT; ++n) {
        if (list[n] == key / BLOCK) return true;
    }
    return false;
}
#define PICKED(b, i, j, h) among(chosen, (b) * QUERIES + (i), h, KEY(b, j))
#else
#define PICKED(b, i, j, h) true
#endif
#define ENDS(b, j) ((KEY(b, j) + 1) % EVERY == 0)
#define OF_QUERY(x, b, i, h) ((x) + ((b) * QUERIES + (i)) * x##_stride + (h) * SIZE)
#define OF_KEY(x, b, j, g) ((x) + ((b) * KEYS + (j)) * x##_stride + (g) * SIZE)
DEVICE float capped(float s) { return CAPPED ? SOFTCAP * tanhf(s / SOFTCAP) : s; }
DEVICE float capped_slope(float s) {
    float t = CAPPED ? tanhf(s / SOFTCAP) : 0.0f;
    return 1.0f - t * t;
}
#define PRODUCT(b, i, j, h) (dot(OF_QUERY(q, b, i, h), OF_KEY(k, b, j, (h) / GROUP)) * SCALE)
#if PROGRAM
#define OF_PAIR(b, i, j, h) b, i, j, h, QUERY(b, i), KEY(b, j)
#define SCORE(s, b, i, j, h) program_score(s, OF_PAIR(b, i, j, h) READS)
#define SLOPE(s, b, i, j, h) program_slope(s, OF_PAIR(b, i, j, h) READS)
#define LEAVES(b, i, j, h) (program_sees(0.0f, OF_PAIR(b, i, j, h) READS) > 0.0f)
#else
#define SCORE(s, b, i, j, h) capped(s)
#define SLOPE(s, b, i, j, h) capped_slope(s)
#define LEAVES(b, i, j, h) true
#endif
#define SEES(b, i, j, h) (near(QUERY(b, i), KEY(b, j)) && TOGETHER(b, i, j) && ENDS(b, j) && PICKED(b, i, j, h) && LEAVES(b, i, j, h))
// The factor of a weight by dropout.
DEVICE float kept(int draw, i64 h, i64 j) {
    u32 x = (u32)draw ^ (u32)h * 0x9e3779b9u;
    x += (u32)j * 0x85ebca6bu;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return (x ^ x >> 16) >= DROPPED ? KEPT : 0.0f;
}
#if DROPOUT
#define FACTOR(b, i, j, h) kept(draws[(b) * QUERIES + (i)], h, j)
#else
#define FACTOR(b, i, j, h) 1.0f
#endif
DEVICE float weight(float score, float lse) { return lse == -infinity() ? 0.0f : expf(score - lse); }
// The weight of a pair, and the cotangent of its score.
#define WEIGHT(s, b, i, j, h, row) weight(SCORE(s, b, i, j, h), lse[row])
#define OF_SCORE(s, b, i, j, h, row)                                                             \
    (WEIGHT(s, b, i, j, h, row) * (dot(OF_QUERY(d, b, i, h), OF_KEY(v, b, j, (h) / GROUP)) * FACTOR(b, i, j, h) -   \
                                   dot(OF_QUERY(d, b, i, h), OF_QUERY(o, b, i, h)) + LOG_COTANGENT(row)))
// A pair of no weight gives nothing, whatever the slope is there.
DEVICE float through(float ds, float slope) { return ds == 0.0f ? 0.0f : ds * slope; }
// pass forward: an element of o
i64 e = at % SIZE, h = at / SIZE % HEADS, i = at / (SIZE * HEADS) % QUERIES, b = at / (SIZE * HEADS * QUERIES);
float most = -infinity();
for (i64 j = 0; j < KEYS; ++j) {
    if (SEES(b, i, j, h)) most = fmaxf(most, SCORE(PRODUCT(b, i, j, h), b, i, j, h));
}
float sum = 0.0f, out = 0.0f;
for (i64 j = 0; j < KEYS; ++j) {
    if (most == -infinity() || !SEES(b, i, j, h)) continue;
    float p = expf(SCORE(PRODUCT(b, i, j, h), b, i, j, h) - most);
    sum += p;
    out = fmaf(p * FACTOR(b, i, j, h), value(OF_KEY(v, b, j, h / GROUP)[e]), out);
}
put(o + at, sum > 0.0f ? out / sum : 0.0f);
if (e == 0) lse[at / SIZE] = sum > 0.0f ? most + logf(sum) : -infinity();
// pass queries: an element of dq
i64 e = at % SIZE, h = at / SIZE % HEADS, i = at / (SIZE * HEADS) % QUERIES, b = at / (SIZE * HEADS * QUERIES);
float sum = 0.0f;
for (i64 j = 0; j < KEYS; ++j) {
    if (!SEES(b, i, j, h)) continue;
    float s = PRODUCT(b, i, j, h);
    float ds = through(OF_SCORE(s, b, i, j, h, at / SIZE), SLOPE(s, b, i, j, h)) * SCALE;
    sum = fmaf(ds, value(OF_KEY(k, b, j, h / GROUP)[e]), sum);
}
put(OF_QUERY(dq, b, i, h) + e, sum);
// pass keys: an element of dk and of dv
i64 e = at % SIZE, g = at / SIZE % KV_HEADS, j = at / (SIZE * KV_HEADS) % KEYS, b = at / (SIZE * KV_HEADS * KEYS);
float of_key = 0.0f, of_value = 0.0f;
for (i64 h = g * GROUP; h < (g + 1) * GROUP; ++h) {
    for (i64 i = 0; i < QUERIES; ++i) {
        if (!SEES(b, i, j, h)) continue;
        i64 row = (b * QUERIES + i) * HEADS + h;
        float s = PRODUCT(b, i, j, h);
        float ds = through(OF_SCORE(s, b, i, j, h, row), SLOPE(s, b, i, j, h)) * SCALE;
        float p = WEIGHT(s, b, i, j, h, row) * FACTOR(b, i, j, h);
        of_key = fmaf(ds, value(OF_QUERY(q, b, i, h)[e]), of_key);
        of_value = fmaf(p, value(OF_QUERY(d, b, i, h)[e]), of_value);
    }
}
put(OF_KEY(dk, b, j, g) + e, of_key);
put(OF_KEY(dv, b, j, g) + e, of_value);
