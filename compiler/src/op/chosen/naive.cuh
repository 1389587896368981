#define WITHIN(b, i, j) (WINDOW == 0 || QUERY(b, i) - KEY(b, j) < WINDOW)
#define SEES(b, i, j) \
    (KEY(b, j) >= 0 && KEY(b, j) <= QUERY(b, i) && WITHIN(b, i, j) && (KEY(b, j) + 1) % EVERY == 0 && TOGETHER(b, i, j))
#define OF_QUERY(b, i, h) (q + ((b) * QUERIES + (i)) * q_stride + (h) * SIZE)
#define OF_KEY(b, j, h) (k + ((b) * KEYS + (j)) * k_stride + (h) / (HEADS / KV_HEADS) * SIZE)
#define LIST(b, i, h) (((b) * QUERIES + (i)) * LISTS + (h) / (HEADS / LISTS))
// Where the keys of a block may be.
#if POSITIONS
#define FIRST(block) 0
#define END(block) KEYS
#else
#define FIRST(block) ((block) * BLOCK)
#define END(block) (((block) + 1) * BLOCK < KEYS ? ((block) + 1) * BLOCK : KEYS)
#endif
#if WEIGHED
#define WEIGHT(b, i, h) weights[((b) * QUERIES + (i)) * HEADS + (h)]
#else
#define WEIGHT(b, i, h) 1.0f
#endif
#define PRODUCT(b, i, j, h) (SCALE * dot(OF_QUERY(b, i, h), OF_KEY(b, j, h)))
#define TERM(s) (RELU ? fmaxf(s, 0.0f) : (s))
// pass mass: a block of a list
i64 c = at / COUNT % LISTS, i = at / (COUNT * LISTS) % QUERIES, b = at / (COUNT * LISTS * QUERIES);
i64 block = chosen[at];
float sum = 0.0f;
for (i64 j = FIRST(block); block >= 0 && j < END(block); ++j) {
    if (KEY(b, j) / BLOCK != block || !SEES(b, i, j)) continue;
    for (i64 h = c * (HEADS / LISTS); h < (c + 1) * (HEADS / LISTS); ++h) {
        float less = lse[(b * QUERIES + i) * HEADS + h];
        if (less > -infinity()) sum += expf(PRODUCT(b, i, j, h) - less);
    }
}
mass[at] = sum;
// pass scores: a token of a list
i64 c = at / COUNT % LISTS, i = at / (COUNT * LISTS) % QUERIES, b = at / (COUNT * LISTS * QUERIES);
i64 block = chosen[at];
float sum = 0.0f;
bool found = false;
for (i64 j = FIRST(block); block >= 0 && j < END(block); ++j) {
    if (KEY(b, j) != block || !SEES(b, i, j)) continue;
    found = true;
    for (i64 h = c * (HEADS / LISTS); h < (c + 1) * (HEADS / LISTS); ++h) {
        sum = fmaf(WEIGHT(b, i, h), TERM(PRODUCT(b, i, j, h)), sum);
    }
}
scores[at] = found ? sum : ABSENT;
// pass queries: an element of dq
i64 e = at % SIZE, h = at / SIZE % HEADS, i = at / (SIZE * HEADS) % QUERIES, b = at / (SIZE * HEADS * QUERIES);
float sum = 0.0f;
for (i64 n = LIST(b, i, h) * COUNT; n < (LIST(b, i, h) + 1) * COUNT; ++n) {
    i64 block = chosen[n];
    for (i64 j = FIRST(block); block >= 0 && j < END(block); ++j) {
        if (KEY(b, j) != block || !SEES(b, i, j) || (RELU && PRODUCT(b, i, j, h) <= 0.0f)) continue;
        sum = fmaf(d[n] * WEIGHT(b, i, h) * SCALE, value(OF_KEY(b, j, h)[e]), sum);
    }
}
put(dq + (b * QUERIES + i) * dq_stride + h * SIZE + e, sum);
// pass keys: an element of dk
i64 e = at % SIZE, g = at / SIZE % KV_HEADS, j = at / (SIZE * KV_HEADS) % KEYS, b = at / (SIZE * KV_HEADS * KEYS);
float sum = 0.0f;
for (i64 h = g * (HEADS / KV_HEADS); h < (g + 1) * (HEADS / KV_HEADS); ++h) {
    for (i64 i = 0; i < QUERIES; ++i) {
        if (!SEES(b, i, j)) continue;
        // Lists are in increasing order, -1 for the rest.
        const int *list = chosen + LIST(b, i, h) * COUNT;
        i64 low = 0, high = COUNT;
        while (low < high) {
            i64 middle = (low + high) / 2;
            if (list[middle] >= 0 && list[middle] < KEY(b, j)) low = middle + 1;
            else high = middle;
        }
        if (low == COUNT || list[low] != KEY(b, j) || (RELU && PRODUCT(b, i, j, h) <= 0.0f)) continue;
        float by = d[LIST(b, i, h) * COUNT + low] * WEIGHT(b, i, h) * SCALE;
        sum = fmaf(by, value(OF_QUERY(b, i, h)[e]), sum);
    }
}
put(dk + (b * KEYS + j) * dk_stride + g * SIZE + e, sum);
// pass weights: the weight of a head
i64 h = at % HEADS, i = at / HEADS % QUERIES, b = at / (HEADS * QUERIES);
float sum = 0.0f;
for (i64 n = LIST(b, i, h) * COUNT; n < (LIST(b, i, h) + 1) * COUNT; ++n) {
    i64 block = chosen[n];
    for (i64 j = FIRST(block); block >= 0 && j < END(block); ++j) {
        if (KEY(b, j) == block && SEES(b, i, j)) sum = fmaf(d[n], TERM(PRODUCT(b, i, j, h)), sum);
    }
}
dweights[at] = sum;
