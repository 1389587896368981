// functions
DEVICE float dot(const Float0 *x, const Float0 *y) {
    float sum = 0.0f;
    for (i64 e = 0; e < SIZE; ++e) sum = fmaf(value(x[e]), value(y[e]), sum);
    return sum;
}
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
