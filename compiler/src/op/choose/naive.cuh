// Keys at ends of blocks have a score.
#define SEES(b, i, j) \
    (KEY(b, j) >= 0 && KEY(b, j) <= QUERY(b, i) && (KEY(b, j) + 1) % BLOCK == 0 && TOGETHER(b, i, j))
#define OF_QUERY(b, i, h) (q + ((b) * QUERIES + (i)) * q_stride + (h) * SIZE)
#define OF_KEY(b, j, h) (k + ((b) * KEYS + (j)) * k_stride + (h) / (HEADS / KV_HEADS) * SIZE)
// pass choose: a list of blocks
i64 c = at % LISTS, i = at / LISTS % QUERIES, b = at / (LISTS * QUERIES);
i64 own = QUERY(b, i) < 0 ? -1 : QUERY(b, i) / BLOCK, found = 0;
int *list = chosen + at * COUNT;
for (i64 n = 0; n < NEAR && n <= own && found < COUNT; ++n) list[found++] = (int)(own - n);
for (i64 n = 0; n < FIRST && n <= own && found < COUNT; ++n) {
    if (n + NEAR <= own) list[found++] = (int)n;
}
// Each time the largest score of those that no list has, of the lowest block.
while (found < COUNT) {
    float most = -infinity();
    i64 best = -1;
    for (i64 j = 0; j < KEYS; ++j) {
        if (!SEES(b, i, j)) continue;
        i64 block = KEY(b, j) / BLOCK;
        bool taken = false;
        for (i64 n = 0; n < found; ++n) taken = taken || list[n] == block;
        if (taken) continue;
        float score = 0.0f;
        for (i64 h = c * (HEADS / LISTS); h < (c + 1) * (HEADS / LISTS); ++h) {
            float s = SCALE * dot(OF_QUERY(b, i, h), OF_KEY(b, j, h));
#if MEASURE == 1
            s = fmaxf(s, 0.0f);
#elif MEASURE == 2
            float high = -infinity(), sum = 0.0f;
            for (i64 other = 0; other < KEYS; ++other) {
                if (SEES(b, i, other)) high = fmaxf(high, SCALE * dot(OF_QUERY(b, i, h), OF_KEY(b, other, h)));
            }
            for (i64 other = 0; other < KEYS; ++other) {
                if (SEES(b, i, other)) sum += expf(SCALE * dot(OF_QUERY(b, i, h), OF_KEY(b, other, h)) - high);
            }
            s = expf(s - high) / sum;
#endif
#if WEIGHED
            s *= weights[(b * QUERIES + i) * HEADS + h];
#endif
            score += s;
        }
        if (best < 0 || score > most || (score == most && block < best)) {
            most = score;
            best = block;
        }
    }
    if (best < 0) break;
    list[found++] = (int)best;
}
// In increasing order.
for (i64 n = 1; n < found; ++n) {
    int block = list[n];
    i64 to = n;
    while (to > 0 && list[to - 1] > block) {
        list[to] = list[to - 1];
        --to;
    }
    list[to] = block;
}
while (found < COUNT) list[found++] = -1;
