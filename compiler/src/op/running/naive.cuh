// pass sums: a channel of a sequence
i64 c = at % CHANNELS, b = at / CHANNELS, last = -1;
#if BLOCK
i64 state = 2 * b * CHANNELS + c;
float before = 0.0f;
#else
i64 state = at;
#endif
float so_far = 0.0f;
#if MARKS == 2
so_far = sum[state];
#if BLOCK
before = sum[state + CHANNELS];
#endif
#endif
for (i64 n = 0; n < SEQUENCE; ++n) {
    i64 token = b * SEQUENCE + (REVERSE ? SEQUENCE - 1 - n : n);
#if MARKS == 1
    if (segments[token] < 0) {
        y[token * CHANNELS + c] = 0.0f;
        continue;
    }
    if (last >= 0 && segments[last] != segments[token]) so_far = 0.0f;
    last = token;
#elif MARKS == 2
    if (slots[token] < 0) {
        y[token * CHANNELS + c] = 0.0f;
        continue;
    }
#endif
#if BLOCK
    float number = (float)((positions[token] < 0 ? 0 : positions[token]) / BLOCK + 1);
    if (before != number) so_far = 0.0f;
    before = number;
#endif
    so_far += x[token * x_stride + c];
    y[token * CHANNELS + c] = so_far;
}
#if MARKS == 2
sum[state] = so_far;
#if BLOCK
sum[state + CHANNELS] = before;
#endif
#endif
