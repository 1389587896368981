// The library of kernel statements: functions that every text of them may call. It is written in
// the language itself (`compiler/src/statement`), which every GPU dialect is printed from.
#pragma once

DEVICE float infinity() { return float_of(0x7f800000u); }
DEVICE float value(float x) { return x; }
// Number `at` of a weight, in whatever it is stored (`blocks.cuh` has the packed ones).
DEVICE float number(const float *from, i64 at) { return from[at]; }
DEVICE float number(const bf16 *from, i64 at) { return value(from[at]); }

DEVICE void put(float *to, float x) { *to = x; }

// A row of no token: -0, and -1 of integers.
DEVICE void absent(float *to) { *to = float_of(0x80000000u); }
DEVICE void absent(int *to) { *to = -1; }

// Whether an index from memory is below a bound; reports where not.
DEVICE bool below(i64 index, i64 bound, int *status, int launch) {
    bool fine = index >= 0 && index < bound;
    if (!fine) report(status, launch);
    return fine;
}

// NaN is never worth choosing.
DEVICE float worth(float x) { return x == x ? x : -infinity(); }
// Whether number `i` comes before number `j` where the largest come first.
DEVICE bool before(float x, i64 i, float y, i64 j) { return worth(x) > worth(y) || (worth(x) == worth(y) && i < j); }

// --- functions of row kernels --------------------------------------------------------------------

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float silu(float x) { return x * sigmoid(x); }
DEVICE float silu_grad(float x) { return sigmoid(x) * (1.0f + x * (1.0f - sigmoid(x))); }
DEVICE float gelu_inner(float x) { return 0.7978846f * (x + 0.044715f * x * x * x); }
DEVICE float gelu(float x) { return 0.5f * x * (1.0f + tanhf(gelu_inner(x))); }
DEVICE float gelu_grad(float x) {
    float t = tanhf(gelu_inner(x)), slope = 0.7978846f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope;
}
DEVICE float square(float x) { return x * x; }
DEVICE float relu(float x) { return x > 0.0f ? x : 0.0f; }
DEVICE float softplus(float x) { return x > 20.0f ? x : logf(1.0f + expf(x)); }
DEVICE float positive(float x) { return x > 0.0f ? 1.0f : 0.0f; }
DEVICE float larger(float a, float b) { return b > a ? b : a; }
DEVICE float unless_zero(float a, float b) { return b != 0.0f ? a : 0.0f; }

// By its series, after whole turns are taken off.
DEVICE float sine(Wide x) {
    const Wide TURN = 6.283185307179586;
    x -= TURN * floor(x / TURN + 0.5);
    Wide term = x, sum = x;
    for (int n = 1; n < 14; ++n) {
        term *= -x * x / (Wide)(2 * n * (2 * n + 1));
        sum += term;
    }
    return (float)sum;
}
DEVICE float cosine(Wide x) { return sine(x + 1.5707963267948966); }
