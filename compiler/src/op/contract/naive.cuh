// pass product: an element of c
i64 i = at / N, j = at % N;
#if SOME
if (places[i] < 0) return;
#endif
float sum = 0.0f;
for (i64 k = 0; k < K; ++k) sum = fmaf(value(a[i * A_ROW + k * A_COLUMN]), number(b, k * B_ROW + j * B_COLUMN), sum);
put(c + at, ACCUMULATE ? value(c[at]) + sum : sum);
