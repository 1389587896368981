// functions
#define READ(name, NAME, c) value(name[token * name##_stride + FIRST_##NAME(h) + (c)])
#if DECAYS == 0
#define DECAY_OF(c) 1.0f
#elif DECAYS == 1
#define DECAY_OF(c) expf(READ(decay, DECAY, 0))
#else
#define DECAY_OF(c) expf(READ(decay, DECAY, c))
#endif
// The first number of a head at a token, of what all heads have.
#define OF_HEAD(width) ((token * HEADS + h) * (width))
// The sum of a number over heads.
#define JOIN(name, NAME, width) \
    float sum = 0.0f; \
    i64 token = at / ROW_##NAME, place = at % ROW_##NAME; \
    for (i64 h = 0; h < HEADS; ++h) { \
        i64 c = place - FIRST_##NAME(h); \
        if (c >= 0 && c < (width)) sum += parts_##name[OF_HEAD(width) + c]; \
    } \
    put(d##name + at, sum)
#if MARKS == 1
#define ABSENT (segments[token] < 0)
// The first token of a document, or the last, in the order in which they come.
#define BEGINS (segments[token] != last)
#define PASSED last = segments[token]
#else
#define ABSENT false
#define BEGINS (last < 0)
#define PASSED last = 0
#endif
// pass forward: a row of a head's state
i64 i = at % VALUE, h = at / VALUE % HEADS, b = at / (VALUE * HEADS);
#if MARKS == 2
float *s = state + b * KEPT + 1 + h * SIZE * VALUE + (SIZE_FIRST ? i : i * SIZE);
const i64 step = SIZE_FIRST ? VALUE : 1;
bool begun = state[b * KEPT] > 0.0f;
#else
float *s = spare + at;
const i64 step = BATCH * HEADS * VALUE;
int last = -1;
#endif
for (i64 t = 0; t < SEQUENCE; ++t) {
    i64 token = b * SEQUENCE + t;
#if MARKS == 2
    bool passes = slots[token] < 0, begins = !begun;
    begun = begun || !passes;
#else
    bool passes = ABSENT, begins = !passes && BEGINS;
#endif
    if (passes) {
        put(o + OF_HEAD(VALUE) + i, 0.0f);
        continue;
    }
#if MARKS != 2
    PASSED;
#endif
    if (begins) {
        for (i64 c = 0; c < SIZE; ++c) s[c * step] = 0.0f;
    }
    float p = 0.0f, y = 0.0f;
#if DELTA > 0
    for (i64 c = 0; c < SIZE; ++c) p = fmaf(s[c * step], READ(u, U, c), p);
#endif
#if BEFORE
    for (i64 c = 0; c < SIZE; ++c) y = fmaf(s[c * step], READ(q, Q, c), y);
#endif
    float x = READ(v, V, i) + (DELTA == 1 ? p : 0.0f);
    for (i64 c = 0; c < SIZE; ++c) {
        float next = fmaf(x, READ(k, K, c), s[c * step] * DECAY_OF(c));
#if DELTA == 2
        next = fmaf(p, READ(w, W, c), next);
#endif
        s[c * step] = next;
#if !BEFORE
        y = fmaf(next, READ(q, Q, c), y);
#endif
    }
    put(o + OF_HEAD(VALUE) + i, y);
}
// pass counts: a text, after all threads that read its number
i64 b = at;
float count = state[b * KEPT];
for (i64 t = 0; t < SEQUENCE; ++t) count += slots[b * SEQUENCE + t] < 0 ? 0.0f : 1.0f;
state[b * KEPT] = count;
// pass products: a row of a head's state, for the products of states with u
i64 i = at % VALUE, h = at / VALUE % HEADS, b = at / (VALUE * HEADS);
float *s = spare + at;
const i64 step = BATCH * HEADS * VALUE;
int last = -1;
for (i64 t = 0; t < SEQUENCE; ++t) {
    i64 token = b * SEQUENCE + t;
    float p = 0.0f;
    if (!(ABSENT)) {
        bool begins = BEGINS;
        PASSED;
        if (begins) {
            for (i64 c = 0; c < SIZE; ++c) s[c * step] = 0.0f;
        }
#if DELTA > 0
        for (i64 c = 0; c < SIZE; ++c) p = fmaf(s[c * step], READ(u, U, c), p);
#endif
        float x = READ(v, V, i) + (DELTA == 1 ? p : 0.0f);
        for (i64 c = 0; c < SIZE; ++c) {
            float next = fmaf(x, READ(k, K, c), s[c * step] * DECAY_OF(c));
#if DELTA == 2
            next = fmaf(p, READ(w, W, c), next);
#endif
            s[c * step] = next;
        }
    }
    products[OF_HEAD(VALUE) + i] = p;
}
// pass queries: a column of a head's state, from the first token, kept before each stretch
i64 c = at % SIZE, h = at / SIZE % HEADS, b = at / (SIZE * HEADS);
const i64 step = BATCH * HEADS * SIZE;
float *s = spare + at, *kept = held + at;
int last = -1;
for (i64 i = 0; i < VALUE; ++i) s[i * step] = 0.0f;
for (i64 t = 0; t < SEQUENCE; ++t) {
    i64 token = b * SEQUENCE + t;
    if (t % STRETCH == 0) {
        for (i64 i = 0; i < VALUE; ++i) kept[(t / STRETCH * VALUE + i) * step] = s[i * step];
    }
    float sum = 0.0f;
    if (!(ABSENT)) {
        bool begins = BEGINS;
        PASSED;
        if (begins) {
            for (i64 i = 0; i < VALUE; ++i) s[i * step] = 0.0f;
        }
#if BEFORE
        for (i64 i = 0; i < VALUE; ++i) sum = fmaf(s[i * step], value(d[token * d_stride + h * VALUE + i]), sum);
#endif
        float a = DECAY_OF(c), key = READ(k, K, c);
        for (i64 i = 0; i < VALUE; ++i) {
            float x = READ(v, V, i);
#if DELTA == 1
            x += products[OF_HEAD(VALUE) + i];
#endif
            float next = fmaf(x, key, s[i * step] * a);
#if DELTA == 2
            next = fmaf(products[OF_HEAD(VALUE) + i], READ(w, W, c), next);
#endif
            s[i * step] = next;
        }
#if !BEFORE
        for (i64 i = 0; i < VALUE; ++i) sum = fmaf(s[i * step], value(d[token * d_stride + h * VALUE + i]), sum);
#endif
    }
    GIVE_Q(c, sum);
}
// pass values: a row of the cotangent of a head's state, from the last token
i64 i = at % VALUE, h = at / VALUE % HEADS, b = at / (VALUE * HEADS);
float *ds = spare + at;
const i64 step = BATCH * HEADS * VALUE;
int last = -1;
for (i64 t = SEQUENCE - 1; t >= 0; --t) {
    i64 token = b * SEQUENCE + t;
    if (ABSENT) {
        GIVE_V(i, 0.0f);
#if DELTA > 0
        backs[OF_HEAD(VALUE) + i] = 0.0f;
#endif
        continue;
    }
    bool begins = BEGINS;
    PASSED;
    float dy = value(d[token * d_stride + h * VALUE + i]), of_v = 0.0f, dp = 0.0f;
    for (i64 c = 0; c < SIZE; ++c) {
        float x = begins ? 0.0f : ds[c * step];
#if !BEFORE
        x = fmaf(dy, READ(q, Q, c), x);
#endif
        ds[c * step] = x;
        of_v = fmaf(x, READ(k, K, c), of_v);
#if DELTA == 2
        dp = fmaf(x, READ(w, W, c), dp);
#endif
    }
    if (DELTA == 1) dp = of_v;
    for (i64 c = 0; c < SIZE; ++c) {
        float x = ds[c * step] * DECAY_OF(c);
#if DELTA > 0
        x = fmaf(dp, READ(u, U, c), x);
#endif
#if BEFORE
        x = fmaf(dy, READ(q, Q, c), x);
#endif
        ds[c * step] = x;
    }
    GIVE_V(i, of_v);
#if DELTA > 0
    backs[OF_HEAD(VALUE) + i] = dp;
#endif
}
// pass keys: a column of the cotangent of a head's state, from the last token; states recomputed
i64 c = at % SIZE, h = at / SIZE % HEADS, b = at / (SIZE * HEADS);
const i64 step = BATCH * HEADS * SIZE;
float *ds = spare + at, *near = held + STRETCHES * VALUE * step + at;
int last = -1;
for (i64 n = STRETCHES - 1; n >= 0; --n) {
    i64 end = (n + 1) * STRETCH < SEQUENCE ? (n + 1) * STRETCH : SEQUENCE;
    int later = last;
    last = -1;
    for (i64 t = n * STRETCH - 1; t >= 0; --t) {
        i64 token = b * SEQUENCE + t;
        if (ABSENT) continue;
        PASSED;
        break;
    }
    const float *from = held + n * VALUE * step + at;
    for (i64 t = n * STRETCH; t < end; ++t) {
        i64 token = b * SEQUENCE + t;
        float *to = near + (t - n * STRETCH) * VALUE * step;
        bool passes = ABSENT, begins = !passes && BEGINS;
        for (i64 i = 0; i < VALUE; ++i) to[i * step] = begins ? 0.0f : from[i * step];
        if (t + 1 == end) break;
        float *next = to + VALUE * step;
        if (passes) {
            from = to;
            continue;
        }
        PASSED;
        float a = DECAY_OF(c), key = READ(k, K, c);
        for (i64 i = 0; i < VALUE; ++i) {
            float x = READ(v, V, i);
#if DELTA == 1
            x += products[OF_HEAD(VALUE) + i];
#endif
            x = fmaf(x, key, to[i * step] * a);
#if DELTA == 2
            x = fmaf(products[OF_HEAD(VALUE) + i], READ(w, W, c), x);
#endif
            next[i * step] = x;
        }
        from = next;
    }
    last = later;
    for (i64 t = end - 1; t >= n * STRETCH; --t) {
        i64 token = b * SEQUENCE + t;
        const float *s = near + (t - n * STRETCH) * VALUE * step;
        float of_k = 0.0f, of_u = 0.0f, of_w = 0.0f, da = 0.0f;
        if (!(ABSENT)) {
            bool begins = BEGINS;
            PASSED;
            float a = DECAY_OF(c), query = READ(q, Q, c);
#if DELTA > 0
            float own = READ(u, U, c);
#endif
            for (i64 i = 0; i < VALUE; ++i) {
                float dy = value(d[token * d_stride + h * VALUE + i]), x = begins ? 0.0f : ds[i * step];
#if !BEFORE
                x = fmaf(dy, query, x);
#endif
                float v_i = READ(v, V, i);
#if DELTA == 1
                v_i += products[OF_HEAD(VALUE) + i];
#elif DELTA == 2
                of_w = fmaf(x, products[OF_HEAD(VALUE) + i], of_w);
#endif
                of_k = fmaf(x, v_i, of_k);
                x *= a;
                da = fmaf(x, s[i * step], da);
#if DELTA > 0
                float dp = backs[OF_HEAD(VALUE) + i];
                of_u = fmaf(dp, s[i * step], of_u);
                x = fmaf(dp, own, x);
#endif
#if BEFORE
                x = fmaf(dy, query, x);
#endif
                ds[i * step] = x;
            }
        }
        GIVE_K(c, of_k);
#if DELTA > 0
        GIVE_U(c, of_u);
#endif
#if DELTA == 2
        GIVE_W(c, of_w);
#endif
#if DECAYS > 0
        GIVE_DECAY(c, da);
#endif
    }
}
// pass join_q: a number of dq that several heads read
JOIN(q, Q, SIZE);
// pass join_k: a number of dk that several heads read
JOIN(k, K, SIZE);
// pass join_v: a number of dv that several heads read
JOIN(v, V, VALUE);
// pass join_u: a number of du that several heads read
JOIN(u, U, SIZE);
// pass join_w: a number of dw that several heads read
JOIN(w, W, SIZE);
// pass join_decay: a number of ddecay that several heads or channels read
float sum = 0.0f;
i64 token = at / ROW_DECAY, place = at % ROW_DECAY;
for (i64 h = 0; h < HEADS; ++h) {
    for (i64 c = 0; c < SIZE; ++c) {
        if (FIRST_DECAY(h) + (DECAYS == 1 ? 0 : c) == place) sum += parts_decay[OF_HEAD(SIZE) + c];
    }
}
put(ddecay + at, sum);
