// pass shift: an element of y, which looks for its token's row one token after another
i64 row = at / WIDTH, first = row / TOKENS * TOKENS, from = row, left = BY;
bool found = true;
#if PLACES
found = places[row] >= 0;
#endif
while (found && left > 0) {
    from += AHEAD ? 1 : -1;
    found = from >= first && from < first + TOKENS;
#if PLACES
    if (found && places[from] < 0) continue;
#endif
#if SEGMENTS
    found = found && segments[from] == segments[row];
#endif
    --left;
}
y[at] = found ? x[from * x_stride + at % WIDTH] : 0.0f;
// pass shift_state: a channel of a text, whose tokens follow one another
i64 channel = at % WIDTH, first = at / WIDTH * TOKENS, before = first, taking = 0;
float *rows = history + at / WIDTH * BY * WIDTH + channel;
for (i64 i = first; i < first + TOKENS; ++i) {
    y[i * WIDTH + channel] = 0.0f;
    if (slots[i] < 0) continue;
    if (taking < BY) {
        y[i * WIDTH + channel] = rows[taking * WIDTH];
    } else {
        while (slots[before] < 0) ++before;
        y[i * WIDTH + channel] = x[before * x_stride + channel];
        ++before;
    }
    ++taking;
}
for (i64 row = 0; row + taking < BY; ++row) rows[row * WIDTH] = rows[(row + taking) * WIDTH];
i64 row = BY - taking;
for (i64 i = first; i < first + TOKENS; ++i) {
    if (slots[i] < 0) continue;
    if (row >= 0) rows[row * WIDTH] = x[i * x_stride + channel];
    ++row;
}
