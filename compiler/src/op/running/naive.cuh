// pass sums: a channel of a sequence
i64 c = at % CHANNELS, b = at / CHANNELS, last = -1;
#if MARKS == 2
float so_far = sum[at];
#else
float so_far = 0.0f;
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
    so_far += x[token * x_stride + c];
    y[token * CHANNELS + c] = so_far;
}
#if MARKS == 2
sum[at] = so_far;
#endif
