// functions
#if MARKS == 1
// The token before or after a token, -1 where its document ends.
DEVICE i64 following(const int *segments, i64 token, bool later) {
    i64 step = later ? 1 : -1;
    for (i64 i = token + step; i >= 0 && i < SEQUENCE; i += step) {
        if (segments[i] >= 0) return segments[i] == segments[token] ? i : -1;
    }
    return -1;
}
#else
DEVICE i64 following(const int *, i64 token, bool later) {
    i64 i = later ? token + 1 : token - 1;
    return i < SEQUENCE ? i : -1;
}
#endif
// pass conv: an element of y
i64 c = at % CHANNELS, i = at / CHANNELS % SEQUENCE, b = at / (CHANNELS * SEQUENCE);
#if MARKS == 1
const int *own = segments + b * SEQUENCE;
bool taken = own[i] >= 0;
#else
const int *own = 0;
bool taken = true;
#endif
float sum = 0.0f;
i64 j = taken ? i : -1;
for (i64 k = 0; k < WIDTH && j >= 0; ++k) {
    sum = fmaf(w[k * CHANNELS + c], x[(b * SEQUENCE + j) * x_stride + c], sum);
    j = following(own, j, REVERSE);
}
y[at] = sum;
// pass continue: a channel of a text
i64 c = at % CHANNELS, b = at / CHANNELS;
float *rows = history + b * (WIDTH - 1) * CHANNELS + c;
for (i64 i = 0; i < SEQUENCE; ++i) {
    i64 token = b * SEQUENCE + i;
    if (slots[token] < 0) {
        y[token * CHANNELS + c] = 0.0f;
        continue;
    }
    float next = x[token * x_stride + c], sum = 0.0f;
    for (i64 k = 0; k + 1 < WIDTH; ++k) {
        float row = rows[k * CHANNELS];
        sum = fmaf(w[(WIDTH - 1 - k) * CHANNELS + c], row, sum);
        if (k > 0) rows[(k - 1) * CHANNELS] = row;
    }
    if (WIDTH > 1) rows[(WIDTH - 2) * CHANNELS] = next;
    y[token * CHANNELS + c] = fmaf(w[c], next, sum);
}
// pass filters: an element of dw
i64 c = at % CHANNELS, m = at / CHANNELS;
float sum = 0.0f;
for (i64 token = 0; token < ROWS; ++token) {
    i64 i = token % SEQUENCE, b = token / SEQUENCE;
#if MARKS == 1
    const int *own = segments + b * SEQUENCE;
    bool taken = own[i] >= 0;
#else
    const int *own = 0;
    bool taken = true;
#endif
    i64 j = taken ? i : -1;
    for (i64 k = 0; k < m && j >= 0; ++k) j = following(own, j, false);
    if (j >= 0) sum = fmaf(dy[token * dy_stride + c], x[(b * SEQUENCE + j) * x_stride + c], sum);
}
dw[at] = sum;
