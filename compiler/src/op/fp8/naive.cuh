// functions
// The nearest number of e4m3 of one that is at most 448, ties to even.
DEVICE float e4m3(float x) {
    u32 bits = bits_of(x), sign = bits & 0x80000000u, size = bits & 0x7fffffffu;
    // Below 2^-6 the sum's last place is 2^-9.
    if (size < 0x3c800000u) return float_of(bits_of(difference_of(float_of(size) + 16384.0f, 16384.0f)) | sign);
    return float_of(((size + 0x7ffffu + (size >> 20 & 1u)) & 0xfff00000u) | sign);
}
// The exponent of a tile's scale, by the bits of its largest magnitude.
DEVICE int exponent_of(u32 largest) {
    int k = (int)(largest >> 23) - 127 - 8 + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0);
    return k > -100 ? k : -100;
}
#if E4M3
// Its code, of a number of e4m3.
DEVICE u32 code_of(float x) {
    u32 bits = bits_of(x), sign = bits >> 24 & 128u, size = bits & 0x7fffffffu;
    if (size < 0x3c800000u) return (bits_of(float_of(size) + 16384.0f) - bits_of(16384.0f)) | sign;
    return ((size >> 20) - 960u) | sign;
}
#endif
DEVICE float power_of_two(int k) { return float_of((u32)(k + 127) << 23); }
// pass tiles: a tile
i64 across = at % ACROSS, down = at / ACROSS % DOWN, matrix = at / ACROSS / DOWN;
i64 first = down * HIGH, end = ROWS;
#if GROUPED
// The group that has the tile of this number; the rows of none come last.
i64 left = down, begin = 0;
bool found = false;
for (i64 e = 0; e <= GROUPS && !found; ++e) {
    end = e < GROUPS ? (i64)offsets[e + 1] : ROWS;
    if (!below(end - begin, ROWS + 1, status, launch) || !below(end, ROWS + 1, status, launch)) return;
    i64 tiles = (end - begin + HIGH - 1) / HIGH;
    found = left < tiles;
    if (found) first = begin + left * HIGH;
    left -= tiles;
    begin = end;
}
if (!found) return;
#endif
i64 last = first + HIGH < end ? first + HIGH : end;
i64 from = across * WIDE, to = from + WIDE < COLUMNS ? from + WIDE : COLUMNS;
u32 largest = 0;
for (i64 row = first; row < last; ++row) {
    for (i64 column = from; column < to; ++column) {
        u32 size = bits_of(value(x[(matrix * ROWS + row) * COLUMNS + column])) & 0x7fffffffu;
        largest = size > largest ? size : largest;
    }
}
int k = exponent_of(largest);
#if E4M3
// Codes, then exponents: those of one tile of all lines together.
bool none = largest >= 0x7f800000u;
i64 lines = TURNED ? COLUMNS : ROWS, depth = TURNED ? ROWS : COLUMNS;
for (i64 row = first; row < last; ++row) {
    for (i64 column = from; column < to; ++column) {
        float number = value(x[row * COLUMNS + column]) * power_of_two(-k);
        i64 line = TURNED ? column : row, sum = TURNED ? row : column;
        y[line * depth + sum] = (u8)(none ? 127u : code_of(e4m3(number)));
        if (sum % 128 == 0) y[lines * depth + sum / 128 * lines + line] = (u8)(none ? 127 : k + 127);
    }
}
#else
for (i64 row = first; row < last; ++row) {
    for (i64 column = from; column < to; ++column) {
        float number = value(x[(matrix * ROWS + row) * COLUMNS + column]) * power_of_two(-k);
        put(y + (matrix * ROWS + row) * COLUMNS + column, largest < 0x7f800000u ? e4m3(number) * power_of_two(k) : float_of(0x7fc00000u));
    }
}
#endif
