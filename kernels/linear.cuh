// Linear attention in chunks of 64 tokens, on the tensor cores.
//
// `S_t = S_{t-1} (α_t + u_t k_tᵀ) + v_t k_tᵀ` and `o_t = S_t q_t`, or `S_{t-1} q_t`, for each head,
// with a decay of each head. Within a chunk `x_t = v_t + S_{t-1} u_t` is the solution of a triangle
// (the WY form of arXiv 2406.06484): `X = T (V + b' U S₀ᵀ)`, `T = (1 - L)⁻¹`,
// `L_ij = D'_ij (u_i · k_j)` for `j < i`. Everything else is products: `O = b Q S₀ᵀ + P X`,
// `P_ij = D_ij (q_i · k_j)` for `j <= i`, and `S = b S₀ + Xᵀ K'`.
//
// All decays are products of those of single tokens, none a quotient: a token that begins a
// document has the factor 0, one that takes no part the factor 1 and rows of zeros. Operands of
// products are bf16, sums f32; a head's state is f32 in registers from chunk to chunk.
//
// A kernel is made for a struct `S` of constants: `TOKENS`, `HEADS`, `SIZE` of keys, `VALUE` of
// values, `DELTA` whether there is `u`, `BEFORE` whether outputs read the state before the token,
// and functions that say where a head begins in a row: `S::q(h)` and so on.
#pragma once
#include "prelude.cuh"

namespace linear {

constexpr int CHUNK = 64, GAP = 8;

// Numbers from row to row of bf16 in shared memory: eight more than `WIDTH`, so that eight rows are
// in other banks.
template <int WIDTH> constexpr int ROW = WIDTH + GAP;

// The left operand of a product, 16 x 16 of `a[row][depth]`, or of `a[depth][row]` where `TURNED`.
template <bool TURNED> DEVICE void left(u32 (&r)[4], const bf16 *a, int row) {
    int lane = int(threadIdx.x) % 32, low = lane % 8, second = lane / 8 % 2, third = lane / 16;
    if (TURNED) load_matrices_transposed(r, a + (low + third * 8) * row + second * 8);
    else load_matrices(r, a + (low + second * 8) * row + third * 8);
}

// The right operand, 16 deep, of 16 columns: `b[column][depth]`, or `b[depth][column]` where
// `TURNED`.
template <bool TURNED> DEVICE void right(u32 (&r)[4], const bf16 *b, int row) {
    int lane = int(threadIdx.x) % 32, low = lane % 8, second = lane / 8 % 2, third = lane / 16;
    if (TURNED) load_matrices_transposed(r, b + (low + second * 8) * row + third * 8);
    else load_matrices(r, b + (low + third * 8) * row + second * 8);
}

// `c += a · b` of 16 rows by `N` columns, the 16 deep from `k` on; `a` is in registers.
template <int N, bool B_TURNED> DEVICE void multiply_piece(float (&c)[N / 8][4], const u32 (&a)[4], const bf16 *b, int b_row, int k) {
#pragma unroll
    for (int n = 0; n < N; n += 16) {
        u32 y[4];
        right<B_TURNED>(y, b + (B_TURNED ? k * b_row + n : n * b_row + k), b_row);
        multiply_matrices(c[n / 8], a, y[0], y[1]);
        multiply_matrices(c[n / 8 + 1], a, y[2], y[3]);
    }
}

// The same, `K` deep.
template <int N, int K, bool A_TURNED, bool B_TURNED>
DEVICE void multiply(float (&c)[N / 8][4], const bf16 *a, int a_row, const bf16 *b, int b_row) {
    static_assert(N % 16 == 0 && K % 16 == 0, "pieces of 16");
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 x[4];
        left<A_TURNED>(x, a + (A_TURNED ? k * a_row : k), a_row);
        multiply_piece<N, B_TURNED>(c, x, b, b_row, k);
    }
}

// The same with the left operand in registers, as another product gave it.
template <int N, int K, bool B_TURNED>
DEVICE void multiply_sums(float (&c)[N / 8][4], const float (&a)[K / 8][4], const bf16 *b, int b_row) {
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 x[4];
        fragment(x, a[k / 8], a[k / 8 + 1]);
        multiply_piece<N, B_TURNED>(c, x, b, b_row, k);
    }
}

template <int N> DEVICE void clear(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n][e] = 0.0f;
}

// Where a lane's sums are: their row (of `half` 0 or 1), and the first of two columns of piece `n`.
DEVICE int row_of(int half) { return int(threadIdx.x) % 32 / 4 + half * 8; }
DEVICE int column_of(int n) { return n * 8 + int(threadIdx.x) % 4 * 2; }

// Each pair of a lane's sums, with its row and first column, to whoever wants it.
template <int N, class Give> DEVICE void each_pair(float (&c)[N][4], Give give) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < N; ++n) give(row_of(half), column_of(n), c[n][2 * half], c[n][2 * half + 1]);
}

// A warp's rows, each by the scale of its token.
template <int N> DEVICE void scale_rows(float (&c)[N][4], const float *scales) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n][e] *= scales[row_of(e / 2)];
}

// Eight adjacent numbers of bf16, on 16 bytes.
DEVICE Words<4> &eight(bf16 *at) { return *reinterpret_cast<Words<4> *>(at); }
DEVICE const Words<4> &eight(const bf16 *at) { return *reinterpret_cast<const Words<4> *>(at); }

// `rows` of `WIDTH` from adjacent memory, or zeros where `keeps(row)` says no; by all threads.
template <int WIDTH, int THREADS, class Keeps>
DEVICE void load_rows(bf16 *to, const bf16 *from, i64 stride, int rows, Keeps keeps) {
    constexpr int ACROSS = WIDTH / 8;
    for (int i = int(threadIdx.x); i < rows * ACROSS; i += THREADS) {
        int row = i / ACROSS, piece = i % ACROSS;
        Words<4> words = {{0, 0, 0, 0}};
        if (keeps(row)) words = eight(from + row * stride + piece * 8);
        eight(to + row * ROW<WIDTH> + piece * 8) = words;
    }
}

// The same asynchronously.
template <int WIDTH, int THREADS> DEVICE void bring_rows(bf16 *to, const bf16 *from, i64 stride, int rows) {
    constexpr int ACROSS = WIDTH / 8;
#pragma unroll 4
    for (int i = int(threadIdx.x); i < rows * ACROSS; i += THREADS) {
        int row = i / ACROSS, piece = i % ACROSS;
        copy_async(to + row * ROW<WIDTH> + piece * 8, from + row * stride + piece * 8, 16);
    }
}

// Eight adjacent numbers, each times the same.
DEVICE Words<4> scaled(Words<4> words, float scale) {
#pragma unroll
    for (u32 &pair : words.of)
        pair = pack(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
    return words;
}

// --- a chunk -------------------------------------------------------------------------------------

// The chunk of a block: its sequence, head, number, and first token.
template <class S> struct Place {
    static constexpr int CHUNKS = (S::TOKENS + CHUNK - 1) / CHUNK;
    int b, h, chunk;
    DEVICE explicit Place(u32 block) {
        chunk = int(take(block, u32(CHUNKS)));
        h = int(take(block, u32(S::HEADS)));
        b = int(block);
    }
    DEVICE i64 number() const { return (i64(b) * S::HEADS + h) * CHUNKS + chunk; }
    DEVICE int first() const { return chunk * CHUNK; }
    DEVICE i64 token(int i) const { return i64(b) * S::TOKENS + first() + i; }
};

// The decays of a chunk's tokens. `near[i][j]`: from after token `j` to before token `i`, 0 where a
// document begins at `i`.
struct Decays {
    float alpha[CHUNK], through[CHUNK], before[CHUNK], after[CHUNK];
    float near[CHUNK][CHUNK + 1];
    int present[CHUNK], begins[CHUNK];

    // From after token `j` to after token `i`.
    DEVICE float far(int i, int j) const { return i == j ? 1.0f : near[i][j] * alpha[i]; }
    DEVICE float whole() const { return through[CHUNK - 1]; }

    // By all threads of the block; ends with a barrier. `decay(token)`: the logarithm;
    // `segment(token)`: the document, or a negative number.
    template <class S, class Decay, class Segment> DEVICE void find(const Place<S> &at, Decay decay, Segment segment) {
        int i = int(threadIdx.x);
        if (i < CHUNK) {
            bool inside = at.first() + i < S::TOKENS;
            i64 token = at.token(inside ? i : 0);
            int own = inside ? segment(token) : -1;
            bool first = inside && own >= 0;
            if (first) {
                i64 start = i64(at.b) * S::TOKENS, last = token - 1;
                while (last >= start && segment(last) < 0) --last;
                first = last < start || segment(last) != own;
            }
            present[i] = own >= 0;
            begins[i] = first;
            alpha[i] = own < 0 ? 1.0f : first ? 0.0f : expf(decay(token, at.h));
        }
        __syncthreads();
        if (i < CHUNK) {
            float product = 1.0f, begin = 1.0f;
            for (int t = 0; t < i; ++t) begin *= alpha[t];
            before[i] = begins[i] ? 0.0f : begin;
            through[i] = begin * alpha[i];
            for (int t = i + 1; t < CHUNK; ++t) {
                near[t][i] = begins[t] ? 0.0f : product;
                product *= alpha[t];
            }
            after[i] = product;
        }
        __syncthreads();
    }
};

// --- forward -------------------------------------------------------------------------------------

// Of every chunk, what needs no state: `K' = K` times the decays to the chunk's end, `Y = T V`,
// `W = T b' U`. `turns`, where gradients are wanted: `T`; `keys_u`: `b' U`; `queries`: `Q` times
// the decays from the chunk's begin.
template <class S> struct ChunkShared {
    bf16 k[CHUNK * ROW<S::SIZE>], u[S::DELTA ? CHUNK * ROW<S::SIZE> : 8], v[CHUNK * ROW<S::VALUE_PART>];
    float triangle[S::DELTA ? CHUNK * (CHUNK + 4) : 4];
    bf16 turn[S::DELTA ? CHUNK * ROW<CHUNK> : 8];
    Decays decays;
};

// `T = (1 - L)⁻¹`, a column for each of 64 threads, 16 rows at a time.
DEVICE void invert(const float *triangle, bf16 *turn) {
    int c = int(threadIdx.x);
    if (c >= CHUNK) return;
    float column[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        float sum = i == c ? 1.0f : 0.0f;
        const float *row = triangle + i * (CHUNK + 4);
#pragma unroll
        for (int j = 0; j < i; ++j) sum = fmaf(row[j], column[j], sum);
        column[i] = sum;
        store(turn[i * ROW<CHUNK> + c], sum);
    }
}

template <class S, bool GRADIENT, class Decay, class Segment>
DEVICE void chunks(const bf16 *q, i64 q_stride, const bf16 *k, i64 k_stride, const bf16 *v, i64 v_stride, const bf16 *u,
                   i64 u_stride, Decay decay, Segment segment, bf16 *ends, bf16 *w, bf16 *x, float *wholes, bf16 *turns,
                   bf16 *keys_u, bf16 *queries) {
    constexpr int D = S::SIZE, E = S::VALUE_PART, THREADS = 128;
    extern __shared__ __align__(16) u8 memory[];
    ChunkShared<S> &s = *reinterpret_cast<ChunkShared<S> *>(memory);
    Place<S> at(blockIdx.x);
    int warp = int(threadIdx.x) / 32;
    s.decays.template find<S>(at, decay, segment);
    auto present = [&](int row) { return s.decays.present[row] != 0; };
    load_rows<D, THREADS>(s.k, k + at.token(0) * k_stride + S::k(at.h), k_stride, CHUNK, present);
    if constexpr (S::DELTA) load_rows<D, THREADS>(s.u, u + at.token(0) * u_stride + S::u(at.h), u_stride, CHUNK, present);
    __syncthreads();
    if (threadIdx.x == 0) wholes[at.number()] = s.decays.whole();
    if constexpr (S::DELTA) {
        float c[CHUNK / 8][4];
        clear(c);
        multiply<CHUNK, D, false, false>(c, s.u + warp * 16 * ROW<D>, ROW<D>, s.k, ROW<D>);
        each_pair(c, [&](int i, int j, float first, float second) {
            i += warp * 16;
            s.triangle[i * (CHUNK + 4) + j] = j < i ? first * s.decays.near[i][j] : 0.0f;
            s.triangle[i * (CHUNK + 4) + j + 1] = j + 1 < i ? second * s.decays.near[i][j + 1] : 0.0f;
        });
        __syncthreads();
        invert(s.triangle, s.turn);
    }
    // `u` and `k` as later kernels read them, scaled in place.
    for (int i = int(threadIdx.x); i < CHUNK * D / 8; i += THREADS) {
        int row = i / (D / 8), column = i % (D / 8) * 8;
        i64 to = at.number() * (CHUNK * D) + i * 8;
        Words<4> &key = eight(s.k + row * ROW<D> + column);
        key = scaled(key, s.decays.after[row]);
        eight(ends + to) = key;
        if constexpr (S::DELTA) {
            Words<4> &own = eight(s.u + row * ROW<D> + column);
            own = scaled(own, s.decays.before[row]);
            if (GRADIENT) eight(keys_u + to) = own;
        }
        if (GRADIENT) {
            Words<4> query = {{0, 0, 0, 0}};
            if (present(row)) query = eight(q + at.token(row) * q_stride + S::q(at.h) + column);
            eight(queries + to) = scaled(query, S::BEFORE ? s.decays.before[row] : s.decays.through[row]);
        }
    }
    __syncthreads();
    if constexpr (S::DELTA) {
        float c[D / 8][4];
        clear(c);
        multiply<D, CHUNK, false, true>(c, s.turn + warp * 16 * ROW<CHUNK>, ROW<CHUNK>, s.u, ROW<D>);
        bf16 *to = w + (at.number() * CHUNK + warp * 16) * D;
        each_pair(c, [&](int i, int j, float first, float second) { store_pair(to + i * D + j, first, second); });
        if (GRADIENT) {
            for (int i = int(threadIdx.x) * 8; i < CHUNK * CHUNK; i += THREADS * 8)
                eight(turns + at.number() * (CHUNK * CHUNK) + i) = eight(s.turn + i / CHUNK * ROW<CHUNK> + i % CHUNK);
        }
    }
    for (int part = 0; part < S::VALUE; part += E) {
        __syncthreads();
        load_rows<E, THREADS>(s.v, v + at.token(0) * v_stride + S::v(at.h) + part, v_stride, CHUNK, present);
        __syncthreads();
        bf16 *to = x + at.number() * (CHUNK * S::VALUE) + part;
        if constexpr (S::DELTA) {
            float c[E / 8][4];
            clear(c);
            multiply<E, CHUNK, false, true>(c, s.turn + warp * 16 * ROW<CHUNK>, ROW<CHUNK>, s.v, ROW<E>);
            each_pair(c, [&](int i, int j, float first, float second) {
                store_pair(to + (i + warp * 16) * S::VALUE + j, first, second);
            });
        } else {
            for (int i = int(threadIdx.x) * 8; i < CHUNK * E; i += THREADS * 8)
                eight(to + i / E * S::VALUE + i % E) = eight(s.v + i / E * ROW<E> + i % E);
        }
    }
}

// A warp's 16 values of a head: rows of its state, which has all keys, and columns of a chunk.
template <class S> struct Own {
    static constexpr int D = S::SIZE, E = S::VALUE_PART;
    int part, warp, h, b;
    // The number of the head's first chunk.
    i64 head;
    DEVICE explicit Own(u32 block) : part(int(take(block, u32(S::VALUE / E))) * E), warp(int(threadIdx.x) / 32) {
        head = i64(block) * Place<S>::CHUNKS;
        h = int(take(block, u32(S::HEADS)));
        b = int(block);
    }

    DEVICE void keep(float (&state)[D / 8][4], i64 chunk, bf16 *kept) const {
        bf16 *to = kept + (chunk * S::VALUE + part + warp * 16) * D;
        each_pair(state, [&](int i, int j, float first, float second) { store_pair(to + i * D + j, first, second); });
    }

    static DEVICE void decay(float (&state)[D / 8][4], float whole) {
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) state[j][e] *= whole;
    }

    // The place of a sum of values by tokens in a tile of tokens by values.
    DEVICE int at(int t, int e) const { return (column_of(t) + e % 2) * ROW<E> + warp * 16 + row_of(e / 2); }

    DEVICE void read(float (&turned)[CHUNK / 8][4], const bf16 *tile) const {
#pragma unroll
        for (int t = 0; t < CHUNK / 8; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) turned[t][e] = to_float(tile[at(t, e)]);
    }

    // Into the tile, and from there to memory, 16 bytes at a time.
    DEVICE void write(const float (&turned)[CHUNK / 8][4], bf16 *tile, i64 chunk, bf16 *all) const {
        __syncwarp();
#pragma unroll
        for (int t = 0; t < CHUNK / 8; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) store(tile[at(t, e)], turned[t][e]);
        __syncwarp();
        bf16 *to = all + chunk * (CHUNK * S::VALUE) + part + warp * 16;
#pragma unroll
        for (int i = int(threadIdx.x) % 32; i < CHUNK * 2; i += 32)
            eight(to + i / 2 * S::VALUE + i % 2 * 8) = eight(tile + i / 2 * ROW<E> + warp * 16 + i % 2 * 8);
    }
};

// The states before all chunks, one chunk after another: a warp has 16 values of a head, `S` of all
// keys. `x` is read as `Y`, and written where there is a delta.
template <class S> struct StateShared {
    bf16 ends[CHUNK * ROW<S::SIZE>], w[S::DELTA ? CHUNK * ROW<S::SIZE> : 8], x[CHUNK * ROW<S::VALUE_PART>];
};

template <class S> DEVICE void states(const bf16 *ends, const bf16 *w, bf16 *x, const float *wholes, bf16 *kept) {
    constexpr int D = S::SIZE, E = S::VALUE_PART, THREADS = E * 2, STAGES = S::STAGES;
    extern __shared__ __align__(16) u8 memory[];
    StateShared<S> *stages = reinterpret_cast<StateShared<S> *>(memory);
    Own<S> own(blockIdx.x);
    auto bring = [&](int chunk) {
        StateShared<S> &to = stages[chunk % STAGES];
        i64 n = own.head + chunk;
        bring_rows<D, THREADS>(to.ends, ends + n * (CHUNK * D), D, CHUNK);
        if (S::DELTA) bring_rows<D, THREADS>(to.w, w + n * (CHUNK * D), D, CHUNK);
        bring_rows<E, THREADS>(to.x, x + n * (CHUNK * S::VALUE) + own.part, S::VALUE, CHUNK);
    };
    float state[D / 8][4];
    clear(state);
    bring(0);
    copy_commit();
#pragma unroll 1
    for (int chunk = 0; chunk < Place<S>::CHUNKS; ++chunk) {
        if (STAGES > 1) {
            if (chunk + 1 < Place<S>::CHUNKS) bring(chunk + 1);
            copy_commit();
            copy_wait<STAGES - 1>();
        } else copy_wait<0>();
        __syncthreads();
        StateShared<S> &s = stages[chunk % STAGES];
        i64 n = own.head + chunk;
        own.keep(state, n, kept);
        float turned[CHUNK / 8][4];
        own.read(turned, s.x);
        if constexpr (S::DELTA) {
            multiply_sums<CHUNK, D, false>(turned, state, s.w, ROW<D>);
            own.write(turned, s.x, n, x);
        }
        own.decay(state, wholes[n]);
        multiply_sums<D, CHUNK, true>(state, turned, s.ends, ROW<D>);
        __syncthreads();
        if (STAGES == 1 && chunk + 1 < Place<S>::CHUNKS) {
            bring(chunk + 1);
            copy_commit();
        }
    }
}

// `P` of a chunk, 16 rows of a warp, in bf16 to shared memory.
template <class S> DEVICE void weights(const Decays &decays, const bf16 *q, const bf16 *k, bf16 *p, int warp) {
    float c[CHUNK / 8][4];
    clear(c);
    multiply<CHUNK, S::SIZE, false, false>(c, q + warp * 16 * ROW<S::SIZE>, ROW<S::SIZE>, k, ROW<S::SIZE>);
    each_pair(c, [&](int i, int j, float first, float second) {
        i += warp * 16;
        auto factor = [&](int j) {
            if (S::BEFORE) return j < i ? decays.near[i][j] : 0.0f;
            return j <= i ? decays.far(i, j) : 0.0f;
        };
        store_pair(p + i * ROW<CHUNK> + j, first * factor(j), second * factor(j + 1));
    });
}

// The outputs of a chunk.
template <class S> struct OutputShared {
    bf16 q[CHUNK * ROW<S::SIZE>], k[CHUNK * ROW<S::SIZE>], p[CHUNK * ROW<CHUNK>], x[CHUNK * ROW<S::VALUE_PART>],
        state[S::VALUE_PART * ROW<S::SIZE>];
    Decays decays;
};

template <class S, class Decay, class Segment>
DEVICE void outputs(const bf16 *q, i64 q_stride, const bf16 *k, i64 k_stride, Decay decay, Segment segment, const bf16 *x,
                    const bf16 *kept, bf16 *o) {
    constexpr int D = S::SIZE, E = S::VALUE_PART, THREADS = 128;
    extern __shared__ __align__(16) u8 memory[];
    OutputShared<S> &s = *reinterpret_cast<OutputShared<S> *>(memory);
    Place<S> at(blockIdx.x);
    int warp = int(threadIdx.x) / 32;
    s.decays.template find<S>(at, decay, segment);
    auto present = [&](int row) { return s.decays.present[row] != 0; };
    auto all = [](int) { return true; };
    load_rows<D, THREADS>(s.q, q + at.token(0) * q_stride + S::q(at.h), q_stride, CHUNK, present);
    load_rows<D, THREADS>(s.k, k + at.token(0) * k_stride + S::k(at.h), k_stride, CHUNK, present);
    __syncthreads();
    weights<S>(s.decays, s.q, s.k, s.p, warp);
    for (int part = 0; part < S::VALUE; part += E) {
        __syncthreads();
        load_rows<E, THREADS>(s.x, x + at.number() * (CHUNK * S::VALUE) + part, S::VALUE, CHUNK, all);
        load_rows<D, THREADS>(s.state, kept + (at.number() * S::VALUE + part) * D, D, E, all);
        __syncthreads();
        float c[E / 8][4];
        clear(c);
        multiply<E, D, false, false>(c, s.q + warp * 16 * ROW<D>, ROW<D>, s.state, ROW<D>);
        scale_rows(c, (S::BEFORE ? s.decays.before : s.decays.through) + warp * 16);
        multiply<E, CHUNK, false, true>(c, s.p + warp * 16 * ROW<CHUNK>, ROW<CHUNK>, s.x, ROW<E>);
        each_pair(c, [&](int i, int j, float first, float second) {
            i += warp * 16;
            if (at.first() + i < S::TOKENS)
                store_pair(o + (at.token(i) * S::HEADS + at.h) * S::VALUE + part + j, first, second);
        });
    }
}

// --- backward ------------------------------------------------------------------------------------

// Of every chunk, what needs no cotangent of a state: `Tᵀ Pᵀ dO`, and `Tᵀ K'` where there is a
// delta.
template <class S> struct CotangentShared {
    bf16 q[CHUNK * ROW<S::SIZE>], k[CHUNK * ROW<S::SIZE>], p[CHUNK * ROW<CHUNK>], turn[S::DELTA ? CHUNK * ROW<CHUNK> : 8],
        d[CHUNK * ROW<S::VALUE_PART>], z[S::DELTA ? CHUNK * ROW<S::VALUE_PART> : 8];
    Decays decays;
};

template <class S, class Decay, class Segment>
DEVICE void cotangents(const bf16 *q, i64 q_stride, const bf16 *k, i64 k_stride, const bf16 *d, i64 d_stride, Decay decay,
                       Segment segment, const bf16 *ends, const bf16 *turns, bf16 *dx, bf16 *back) {
    constexpr int D = S::SIZE, E = S::VALUE_PART, THREADS = 128;
    extern __shared__ __align__(16) u8 memory[];
    CotangentShared<S> &s = *reinterpret_cast<CotangentShared<S> *>(memory);
    Place<S> at(blockIdx.x);
    int warp = int(threadIdx.x) / 32;
    s.decays.template find<S>(at, decay, segment);
    auto present = [&](int row) { return s.decays.present[row] != 0; };
    auto all = [](int) { return true; };
    load_rows<D, THREADS>(s.q, q + at.token(0) * q_stride + S::q(at.h), q_stride, CHUNK, present);
    load_rows<D, THREADS>(s.k, k + at.token(0) * k_stride + S::k(at.h), k_stride, CHUNK, present);
    if (S::DELTA) load_rows<CHUNK, THREADS>(s.turn, turns + at.number() * (CHUNK * CHUNK), CHUNK, CHUNK, all);
    __syncthreads();
    weights<S>(s.decays, s.q, s.k, s.p, warp);
    if constexpr (S::DELTA) {
        // In the place of the queries, which are used.
        __syncthreads();
        load_rows<D, THREADS>(s.q, ends + at.number() * (CHUNK * D), D, CHUNK, all);
        __syncthreads();
        float c[D / 8][4];
        clear(c);
        multiply<D, CHUNK, true, true>(c, s.turn + warp * 16, ROW<CHUNK>, s.q, ROW<D>);
        bf16 *to = back + (at.number() * CHUNK + warp * 16) * D;
        each_pair(c, [&](int i, int j, float first, float second) { store_pair(to + i * D + j, first, second); });
    }
    for (int part = 0; part < S::VALUE; part += E) {
        __syncthreads();
        load_rows<E, THREADS>(s.d, d + at.token(0) * d_stride + at.h * S::VALUE + part, d_stride, CHUNK, present);
        __syncthreads();
        float c[E / 8][4];
        clear(c);
        multiply<E, CHUNK, true, true>(c, s.p + warp * 16, ROW<CHUNK>, s.d, ROW<E>);
        if constexpr (S::DELTA) {
            each_pair(c, [&](int i, int j, float first, float second) {
                store_pair(s.z + (i + warp * 16) * ROW<E> + j, first, second);
            });
            __syncthreads();
            clear(c);
            multiply<E, CHUNK, true, true>(c, s.turn + warp * 16, ROW<CHUNK>, s.z, ROW<E>);
        }
        bf16 *to = dx + (at.number() * CHUNK + warp * 16) * S::VALUE + part;
        each_pair(c, [&](int i, int j, float first, float second) { store_pair(to + i * S::VALUE + j, first, second); });
    }
}

// The cotangents of the states after all chunks, from the last chunk to the first; `dx` becomes the
// cotangent of `v`.
template <class S> struct BackShared {
    bf16 back[CHUNK * ROW<S::SIZE>], u[S::DELTA ? CHUNK * ROW<S::SIZE> : 8], q[CHUNK * ROW<S::SIZE>], dx[CHUNK * ROW<S::VALUE_PART>],
        d[CHUNK * ROW<S::VALUE_PART>];
};

template <class S>
DEVICE void back_states(const bf16 *d, i64 d_stride, const bf16 *back, const bf16 *keys_u, const bf16 *queries,
                        const float *wholes, bf16 *dx, bf16 *dkept) {
    constexpr int D = S::SIZE, E = S::VALUE_PART, THREADS = E * 2, STAGES = S::BACK_STAGES, CHUNKS = Place<S>::CHUNKS;
    extern __shared__ __align__(16) u8 memory[];
    BackShared<S> *stages = reinterpret_cast<BackShared<S> *>(memory);
    Own<S> own(blockIdx.x);
    auto bring = [&](int chunk) {
        BackShared<S> &to = stages[chunk % STAGES];
        i64 n = own.head + chunk;
        bring_rows<D, THREADS>(to.back, back + n * (CHUNK * D), D, CHUNK);
        if (S::DELTA) bring_rows<D, THREADS>(to.u, keys_u + n * (CHUNK * D), D, CHUNK);
        bring_rows<D, THREADS>(to.q, queries + n * (CHUNK * D), D, CHUNK);
        bring_rows<E, THREADS>(to.dx, dx + n * (CHUNK * S::VALUE) + own.part, S::VALUE, CHUNK);
        // Rows after the last token are zeros, and so are the queries of tokens that take no part.
        int rows = S::TOKENS - chunk * CHUNK;
        for (int i = int(threadIdx.x); i < CHUNK * (E / 8); i += THREADS) {
            int row = i / (E / 8), piece = i % (E / 8);
            i64 token = i64(own.b) * S::TOKENS + chunk * CHUNK + (row < rows ? row : 0);
            copy_async(to.d + row * ROW<E> + piece * 8, d + token * d_stride + own.h * S::VALUE + own.part + piece * 8, row < rows ? 16 : 0);
        }
    };
    float state[D / 8][4];
    clear(state);
    bring(CHUNKS - 1);
    copy_commit();
#pragma unroll 1
    for (int chunk = CHUNKS - 1; chunk >= 0; --chunk) {
        if (STAGES > 1) {
            if (chunk > 0) bring(chunk - 1);
            copy_commit();
            copy_wait<STAGES - 1>();
        } else copy_wait<0>();
        __syncthreads();
        BackShared<S> &s = stages[chunk % STAGES];
        i64 n = own.head + chunk;
        own.keep(state, n, dkept);
        float turned[CHUNK / 8][4];
        own.read(turned, s.dx);
        multiply_sums<CHUNK, D, false>(turned, state, s.back, ROW<D>);
        own.write(turned, s.dx, n, dx);
        own.decay(state, wholes[n]);
        multiply<D, CHUNK, true, true>(state, s.d + own.warp * 16, ROW<E>, s.q, ROW<D>);
        if constexpr (S::DELTA) multiply_sums<D, CHUNK, true>(state, turned, s.u, ROW<D>);
        __syncthreads();
        if (STAGES == 1 && chunk > 0) {
            bring(chunk - 1);
            copy_commit();
        }
    }
}

// Every gradient of a chunk, from the states before it, the cotangents of the states after it, and
// `dx`.
template <class S> struct GradientShared {
    bf16 q[CHUNK * ROW<S::SIZE>], k[CHUNK * ROW<S::SIZE>], u[S::DELTA ? CHUNK * ROW<S::SIZE> : 8], z[CHUNK * ROW<CHUNK>],
        z_u[S::DELTA ? CHUNK * ROW<CHUNK> : 8], d[CHUNK * ROW<S::VALUE_PART>], x[CHUNK * ROW<S::VALUE_PART>],
        state[S::VALUE_PART * ROW<S::SIZE>], dstate[S::VALUE_PART * ROW<S::SIZE>];
    // Sums around the decays: of rows by halves of the columns, of columns by strips of the rows.
    float rows[2][CHUNK], rows_u[2][CHUNK], columns[4][CHUNK], columns_u[4][CHUNK];
    float of_q[2][CHUNK], of_u[2][CHUNK], of_k[2][CHUNK], of_state[8];
    Decays decays;
};

// The sums over a row's columns, by its four lanes, and over 16 rows, by the eight lanes of a
// column.
DEVICE float row_sum(float x) { return lanes<Sum, 4>(x, 15u << (threadIdx.x % 32 / 4 * 4)); }
DEVICE float column_sum(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

// Row by row the product with a matrix in shared memory, summed over this half of the columns.
template <class S, int N> DEVICE void row_products(const float (&c)[N / 8][4], const bf16 *with, float *to) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                sum = fmaf(c[n][2 * half + e], to_float(with[row_of(half) * ROW<S::SIZE> + column_of(n) + e]), sum);
        sum = row_sum(sum);
        if (threadIdx.x % 4 == 0) to[row_of(half)] = sum;
    }
}

// `z`, the cotangent of products of two rows with the decays between them (`factor`), of a strip,
// to shared memory; and the sums of it with the products, which decays are in.
template <class S, int N, class Factor>
DEVICE void pair_cotangents(float (&m)[N / 8][4], const float (&products)[N / 8][4], bf16 *z, float *rows, float *columns,
                            Factor factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
            float first = m[n][2 * half] * factor(row_of(half), column_of(n));
            float second = m[n][2 * half + 1] * factor(row_of(half), column_of(n) + 1);
            store_pair(z + row_of(half) * ROW<CHUNK> + column_of(n), first, second);
            m[n][2 * half] = first * products[n][2 * half], m[n][2 * half + 1] = second * products[n][2 * half + 1];
        }
    if (!S::DECAY) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N / 8; ++n) sum += m[n][2 * half] + m[n][2 * half + 1];
        sum = row_sum(sum);
        if (threadIdx.x % 4 == 0) rows[row_of(half)] = sum;
    }
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float sum = column_sum(m[n][e] + m[n][2 + e]);
            if (threadIdx.x % 32 < 4) columns[column_of(n) + e] = sum;
        }
}

// A warp's rows from `strip` on, `N` columns from `first` on, to whoever wants the numbers of a
// token and a head.
template <class S, int N, class Give> DEVICE void give_rows(const Place<S> &at, float (&c)[N / 8][4], int strip, int first, Give give) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = strip + row_of(half);
        if (at.first() + row >= S::TOKENS) continue;
        i64 token = at.token(row);
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
            give(token, at.h, first + column_of(n), c[n][2 * half], c[n][2 * half + 1]);
        }
    }
}

template <class S, class Decay, class Segment, class GiveQ, class GiveK, class GiveV, class GiveU, class GiveDecay>
DEVICE void gradients(const bf16 *q, i64 q_stride, const bf16 *k, i64 k_stride, const bf16 *u, i64 u_stride, const bf16 *d,
                      i64 d_stride, Decay decay, Segment segment, const bf16 *x, const bf16 *dx, const bf16 *kept, const bf16 *dkept,
                      GiveQ give_q, GiveK give_k, GiveV give_v, GiveU give_u, GiveDecay give_decay) {
    constexpr int D = S::SIZE, E = S::VALUE_PART, HALVES = S::HALVES, THREADS = 128 * HALVES, N = D / HALVES, C = CHUNK / HALVES;
    extern __shared__ __align__(16) u8 memory[];
    GradientShared<S> &s = *reinterpret_cast<GradientShared<S> *>(memory);
    Place<S> at(blockIdx.x);
    int warp = int(threadIdx.x) / 32, strip = warp % 4 * 16, half = warp / 4;
    s.decays.template find<S>(at, decay, segment);
    auto present = [&](int row) { return s.decays.present[row] != 0; };
    auto all = [](int) { return true; };
    auto inside = [&](int row) { return at.first() + row < S::TOKENS; };
    load_rows<D, THREADS>(s.q, q + at.token(0) * q_stride + S::q(at.h), q_stride, CHUNK, present);
    load_rows<D, THREADS>(s.k, k + at.token(0) * k_stride + S::k(at.h), k_stride, CHUNK, present);
    if constexpr (S::DELTA) load_rows<D, THREADS>(s.u, u + at.token(0) * u_stride + S::u(at.h), u_stride, CHUNK, present);
    const bf16 *own_x = x + at.number() * (CHUNK * S::VALUE), *own_dx = dx + at.number() * (CHUNK * S::VALUE);
    // Of queries.
    {
        float of[N / 8][4], m[C / 8][4], products[C / 8][4];
        clear(of), clear(m), clear(products);
        for (int part = 0; part < S::VALUE; part += E) {
            __syncthreads();
            load_rows<E, THREADS>(s.d, d + at.token(0) * d_stride + at.h * S::VALUE + part, d_stride, CHUNK, present);
            load_rows<E, THREADS>(s.x, own_x + part, S::VALUE, CHUNK, all);
            load_rows<D, THREADS>(s.state, kept + (at.number() * S::VALUE + part) * D, D, E, all);
            __syncthreads();
            multiply<C, E, false, false>(m, s.d + strip * ROW<E>, ROW<E>, s.x + half * C * ROW<E>, ROW<E>);
            multiply<N, E, false, true>(of, s.d + strip * ROW<E>, ROW<E>, s.state + half * N, ROW<D>);
        }
        scale_rows(of, (S::BEFORE ? s.decays.before : s.decays.through) + strip);
        if (S::DECAY) {
            row_products<S, N>(of, s.q + strip * ROW<D> + half * N, s.of_q[half] + strip);
            multiply<C, D, false, false>(products, s.q + strip * ROW<D>, ROW<D>, s.k + half * C * ROW<D>, ROW<D>);
        }
        pair_cotangents<S, C>(m, products, s.z + strip * ROW<CHUNK> + half * C, s.rows[half] + strip,
                              s.columns[strip / 16] + half * C, [&](int i, int j) {
                                  i += strip, j += half * C;
                                  if (S::BEFORE) return j < i ? s.decays.near[i][j] : 0.0f;
                                  return j <= i ? s.decays.far(i, j) : 0.0f;
                              });
        __syncthreads();
        multiply<N, CHUNK, false, true>(of, s.z + strip * ROW<CHUNK>, ROW<CHUNK>, s.k + half * N, ROW<D>);
        give_rows<S, N>(at, of, strip, half * N, give_q);
    }
    if constexpr (S::DELTA) {
        float of[N / 8][4], m[C / 8][4], products[C / 8][4];
        clear(of), clear(m), clear(products);
        for (int part = 0; part < S::VALUE; part += E) {
            __syncthreads();
            load_rows<E, THREADS>(s.d, own_dx + part, S::VALUE, CHUNK, all);
            load_rows<E, THREADS>(s.x, own_x + part, S::VALUE, CHUNK, all);
            load_rows<D, THREADS>(s.state, kept + (at.number() * S::VALUE + part) * D, D, E, all);
            __syncthreads();
            multiply<C, E, false, false>(m, s.d + strip * ROW<E>, ROW<E>, s.x + half * C * ROW<E>, ROW<E>);
            multiply<N, E, false, true>(of, s.d + strip * ROW<E>, ROW<E>, s.state + half * N, ROW<D>);
        }
        scale_rows(of, s.decays.before + strip);
        if (S::DECAY) {
            row_products<S, N>(of, s.u + strip * ROW<D> + half * N, s.of_u[half] + strip);
            multiply<C, D, false, false>(products, s.u + strip * ROW<D>, ROW<D>, s.k + half * C * ROW<D>, ROW<D>);
        }
        pair_cotangents<S, C>(m, products, s.z_u + strip * ROW<CHUNK> + half * C, s.rows_u[half] + strip,
                              s.columns_u[strip / 16] + half * C, [&](int i, int j) {
                                  i += strip, j += half * C;
                                  return j < i ? s.decays.near[i][j] : 0.0f;
                              });
        __syncthreads();
        multiply<N, CHUNK, false, true>(of, s.z_u + strip * ROW<CHUNK>, ROW<CHUNK>, s.k + half * N, ROW<D>);
        give_rows<S, N>(at, of, strip, half * N, give_u);
    }
    // Of keys, and of values.
    {
        float of[N / 8][4], joint = 0.0f;
        clear(of);
        for (int part = 0; part < S::VALUE; part += E) {
            __syncthreads();
            load_rows<E, THREADS>(s.x, own_x + part, S::VALUE, CHUNK, all);
            load_rows<D, THREADS>(s.dstate, dkept + (at.number() * S::VALUE + part) * D, D, E, all);
            if (S::DECAY) load_rows<D, THREADS>(s.state, kept + (at.number() * S::VALUE + part) * D, D, E, all);
            __syncthreads();
            multiply<N, E, false, true>(of, s.x + strip * ROW<E>, ROW<E>, s.dstate + half * N, ROW<D>);
            if (S::DECAY) {
                for (int i = int(threadIdx.x) * 2; i < E * D; i += THREADS * 2) {
                    int place = i / D * ROW<D> + i % D;
                    TwoFloats a = load_pair(s.state + place), b = load_pair(s.dstate + place);
                    joint = fmaf(a.low, b.low, fmaf(a.high, b.high, joint));
                }
            }
            for (int i = int(threadIdx.x) * 2; i < CHUNK * E; i += THREADS * 2) {
                int row = i / E, column = part + i % E;
                if (!inside(row)) continue;
                TwoFloats pair = load_pair(own_dx + row * S::VALUE + column);
                give_v(at.token(row), at.h, column, pair.low, pair.high);
            }
        }
        scale_rows(of, s.decays.after + strip);
        if (S::DECAY) {
            row_products<S, N>(of, s.k + strip * ROW<D> + half * N, s.of_k[half] + strip);
            joint = lanes<Sum, 32>(joint, ALL_LANES);
            if (threadIdx.x % 32 == 0) s.of_state[warp] = joint;
        }
        multiply<N, CHUNK, true, true>(of, s.z + strip, ROW<CHUNK>, s.q + half * N, ROW<D>);
        if (S::DELTA) multiply<N, CHUNK, true, true>(of, s.z_u + strip, ROW<CHUNK>, s.u + half * N, ROW<D>);
        give_rows<S, N>(at, of, strip, half * N, give_k);
    }
    if constexpr (S::DECAY) {
        __syncthreads();
        int t = int(threadIdx.x);
        if (t < CHUNK && inside(t)) {
            float sum = 0.0f;
            for (int w = 0; w < THREADS / 32; ++w) sum += s.of_state[w];
            sum *= s.decays.whole();
            auto of = [&](const float (&halves)[2][CHUNK], int i) { return HALVES == 2 ? halves[0][i] + halves[1][i] : halves[0][i]; };
            auto down = [&](const float (&strips)[4][CHUNK], int j) { return strips[0][j] + strips[1][j] + strips[2][j] + strips[3][j]; };
            for (int j = 0; j < t; ++j) sum += of(s.of_k, j);
            for (int i = t; i < CHUNK; ++i) {
                // Pairs with one token before this one and one not.
                float pairs = of(s.rows, i) - down(s.columns, i), query = of(s.of_q, i);
                if (S::BEFORE) {
                    // Outputs of this token read the state before it.
                    sum += i > t ? query + of(s.rows, i) : 0.0f;
                    sum -= down(s.columns, i);
                } else sum += query + pairs;
                if (S::DELTA) sum += (i > t ? of(s.of_u, i) + of(s.rows_u, i) : 0.0f) - down(s.columns_u, i);
            }
            bool none = !s.decays.present[t] || s.decays.alpha[t] == 0.0f;
            give_decay(at.token(t), at.h, none ? 0.0f : sum);
        }
    }
}

// The sum over heads of what each left, of a row of `ROW_WIDTH` numbers at a token: `first(h)` is
// where a head begins.
template <class S, int WIDTH, int ROW_WIDTH, class C, class First> DEVICE void join_heads(const float *parts, C *to, First first) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= i64(S::BATCH) * S::TOKENS * ROW_WIDTH) return;
    i64 token = at / ROW_WIDTH;
    int place = int(at % ROW_WIDTH);
    float sum = 0.0f;
    for (int h = 0; h < S::HEADS; ++h) {
        int c = place - int(first(h));
        if (c >= 0 && c < WIDTH) sum += parts[(token * S::HEADS + h) * WIDTH + c];
    }
    store(to[at], sum);
}

}  // namespace linear
