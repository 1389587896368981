// Products of the vectors of heads with a matrix of each head: what latent attention absorbs of the
// projections that would make keys and values.
#pragma once
#include "product.cuh"

// `y[row, head, n] = Σ_k x[row, head, k] · w[head, first + n, k]`, or `w[head, first + k, n]` where
// `TRANSPOSED`; a head's matrix has `out` rows. `SOME`: rows of negative place are left as they
// are. All heads' matrices are one below another, and so are vectors side by side.
template <class T, bool TRANSPOSED, bool SOME, class E, class C>
DEVICE void by_head(const E *x, const E *w, C *y, int rows, int heads, int out, int first, int n, int k,
                    const int *places = nullptr) {
    __shared__ typename T::Shared shared;
    typename T::Pipe pipe(shared);
    u32 block = blockIdx.x;
    int column = int(take(block, tiles_over(n, T::COLUMNS))) * T::COLUMNS, head = int(take(block, u32(heads)));
    TileRows<T, SOME> lines(places, rows, int(block) * T::ROWS);
    if (SOME && lines.count <= 0) return;
    int columns = least(T::COLUMNS, n - column), matrix = head * out + first;
    C *to = y + ((i64(lines.base) * heads + head) * n + column);
    auto vectors = operand<true>(x, heads * k).at(lines.base, head * k);
    auto part = operand<!TRANSPOSED>(w, TRANSPOSED ? n : k).at(TRANSPOSED ? column : matrix + column, TRANSPOSED ? matrix : 0);
    typename T::Sums sums;
    multiply_rows<T, true, !TRANSPOSED>(pipe, sums, lines, columns, k, vectors, part);
    each<T>(sums, lines.count, columns, [&](int i, int j) { return put<false>(to + (i64(lines[i]) * heads * n + j)); });
}
