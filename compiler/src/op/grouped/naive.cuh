// functions
// The row of `x` of a slot; -1 where its order is out of range, which is reported.
DEVICE i64 row_of(const int *order, i64 slot, int *status, int launch) {
#if GATHER
    int of = order[slot];
    return below(of, SLOTS, status, launch) ? of / GATHER : -1;
#else
    return slot;
#endif
}
// pass grouped: an element of y
i64 slot = at / WIDTH, column = at % WIDTH;
float sum = 0.0f;
for (i64 e = 0; e < EXPERTS; ++e) {
    i64 first = offsets[e], end = offsets[e + 1];
    if (slot < first || slot >= end) continue;
#if GATHER
    i64 row = row_of(order, slot, status, launch);
#else
    i64 row = slot;
#endif
    if (row < 0) return;
    for (i64 k = 0; k < DEPTH; ++k) {
        i64 element = TRANSPOSED ? k * WIDTH + column : column * DEPTH + k;
        sum = fmaf(value(x[row * DEPTH + k]), number(w, e * OUT * INNER + element), sum);
    }
}
put(y + at, sum);
// pass outer: an element of w
i64 e = at / (OUT * INNER), o = at / INNER % OUT, i = at % INNER;
i64 first = offsets[e], end = offsets[e + 1];
float sum = 0.0f;
for (i64 slot = first; slot < end; ++slot) {
    if (!below(slot, SLOTS, status, launch)) return;
#if GATHER
    i64 row = row_of(order, slot, status, launch);
#else
    i64 row = slot;
#endif
    if (row < 0) return;
    sum = fmaf(value(y[slot * OUT + o]), value(x[row * INNER + i]), sum);
}
w[at] = ACCUMULATE ? w[at] + sum : sum;
