// functions
DEVICE float number_of(u32 code) {
    u32 sign = (code & 128u) << 24, size = code & 127u;
    if (size == 127u) return float_of(0x7fc00000u);
    // Multiples of 2^-9 below 2^-6.
    if (size < 8u) return float_of(bits_of((float)size * 0.001953125f) | sign);
    return float_of(((size << 20) + (120u << 23)) | sign);
}
DEVICE float scale_of(u32 exponent) { return float_of(exponent << 23); }
// pass product: an element of c
i64 i = at / N, j = at % N;
float sum = 0.0f;
for (i64 k = 0; k < K; ++k) {
    float x = number_of((u32)a[i * K + k]) * scale_of((u32)a[M * K + k / 128 * M + i]);
    float y = number_of((u32)b[j * K + k]) * scale_of((u32)b[N * K + k / 128 * N + j]);
    sum = fmaf(x, y, sum);
}
put(c + at, ACCUMULATE ? value(c[at]) + sum : sum);
