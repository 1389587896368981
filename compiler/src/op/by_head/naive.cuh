// pass by_head: an element of y
i64 row = at / (HEADS * N), head = at / N % HEADS, column = at % N;
#if SOME
if (places[row] < 0) return;
#endif
float sum = 0.0f;
for (i64 k = 0; k < K; ++k) {
    i64 element = TRANSPOSED ? (FIRST + k) * INNER + column : (FIRST + column) * INNER + k;
    sum = fmaf(value(x[(row * HEADS + head) * K + k]), number(w, head * OUT * INNER + element), sum);
}
put(y + at, sum);
