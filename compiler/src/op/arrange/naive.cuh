// pass arrange: an element of y
const i64 sizes[LOOPS] = SIZES, strides[LOOPS] = STRIDES;
i64 left = at, from = 0;
for (int k = LOOPS - 1; k >= 0; --k) {
    from += left % sizes[k] * strides[k];
    left /= sizes[k];
}
y[at] = x[from];
