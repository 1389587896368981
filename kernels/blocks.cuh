// Packed numbers: a type for the blocks of each format, and the number of an element of one, with
// the bits that `compiler/src/format` unpacks.
//
// A text that includes it has `u8`, `u16`, `u32`, `i64`, `DEVICE`, `float_of`, and `product_of` and
// `difference_of`, which are rounded each for itself.
#pragma once

DEVICE float signed_of(bool negative, float x) { return negative ? -x : x; }

// IEEE binary16.
DEVICE float half_of(u32 bits) {
    u32 size = bits & 0x7fffu;
    // A product with a power of two is exact, of numbers below the normal ones, too.
    float x = size < 0x7c00u ? product_of(float_of(size << 13), float_of(239u << 23)) : float_of(size << 13 | 0x7f800000u);
    return signed_of(bits & 0x8000u, x);
}

// Half the power of two that a scale of MXFP4 is; NaN for the code that means it.
DEVICE float half_of_power(u32 e) {
    if (e == 255) return float_of(0x7fc00000u);
    return float_of(e < 2 ? 1u << (21 + e) : (e - 1) << 23);
}

// A scale in E4M3, whose sign is not read.
DEVICE float e4m3(u32 code) { return product_of(float_of((code & 0x7fu) << 20), float_of(247u << 23)); }

// Twice a number of E2M1.
DEVICE float e2m1(u32 code) {
    int size = code & 7u, twice = size < 2 ? size : (2 + (size & 1)) << (size / 2 - 1);
    return float(code & 8u ? -twice : twice);
}

DEVICE u32 half_at(const u8 *from) { return from[0] | u32(from[1]) << 8; }
DEVICE float float_at(const u8 *from) { return float_of(half_at(from) | half_at(from + 2) << 16); }
// Four bits of a byte: the lower, or the upper.
DEVICE u32 nibble(u32 byte, bool upper) { return (upper ? byte >> 4 : byte) & 15u; }

struct F16 {
    static constexpr int UNIT = 1;
    u8 of[2];
    DEVICE float at(int) const { return half_of(half_at(of)); }
};

template <int ROW> struct Int8 {
    static constexpr int UNIT = ROW;
    u8 of[4 + ROW];
    DEVICE float at(int i) const { return product_of(float((signed char)of[4 + i]), float_at(of)); }
};

struct Q8 {
    static constexpr int UNIT = 32;
    u8 of[34];
    DEVICE float at(int i) const { return product_of(float((signed char)of[2 + i]), half_of(half_at(of))); }
};

struct Q4 {
    static constexpr int UNIT = 32;
    u8 of[18];
    DEVICE float at(int i) const {
        return product_of(float(int(nibble(of[2 + i % 16], i >= 16)) - 8), half_of(half_at(of)));
    }
};

struct Mxfp4 {
    static constexpr int UNIT = 32;
    u8 of[17];
    DEVICE float at(int i) const { return product_of(e2m1(nibble(of[1 + i % 16], i >= 16)), half_of_power(of[0])); }
};

// A row, which begins with the scale of its tensor: 16 numbers have eight bytes of codes.
template <int ROW> struct Nvfp4 {
    static constexpr int UNIT = ROW;
    u8 of[4 + ROW / 16 * 9];
    DEVICE float at(int i) const {
        const u8 *block = of + 4 + i / 64 * 36;
        int part = i % 64 / 16, within = i % 16;
        float scale = product_of(product_of(e4m3(block[part]), float_at(of)), 0.5f);
        return product_of(e2m1(nibble(block[4 + 8 * part + within % 8], within >= 8)), scale);
    }
};

struct Q4K {
    static constexpr int UNIT = 256;
    u8 of[144];
    DEVICE float at(int i) const {
        const u8 *six = of + 4;
        int part = i / 32;
        u32 scale = six[part] & 63u, offset = six[part + 4] & 63u;
        if (part >= 4) {
            scale = (six[part + 4] & 15u) | u32(six[part - 4] >> 6) << 4;
            offset = u32(six[part + 4] >> 4) | u32(six[part] >> 6) << 4;
        }
        float by = product_of(half_of(half_at(of)), float(scale));
        float less = product_of(half_of(half_at(of + 2)), float(offset));
        u32 code = nibble(of[16 + i / 64 * 32 + i % 32], part % 2);
        return difference_of(product_of(by, float(code)), less);
    }
};

struct Q6K {
    static constexpr int UNIT = 256;
    u8 of[210];
    DEVICE float at(int i) const {
        int half = i / 128, quarter = i % 128 / 32, within = i % 32;
        u32 low = nibble(of[64 * half + 32 * (quarter % 2) + within], quarter / 2);
        u32 high = of[128 + 32 * half + within] >> (2 * quarter) & 3u;
        float by = product_of(half_of(half_at(of + 208)), float((signed char)of[192 + i / 16]));
        return product_of(by, float(int(low | high << 4) - 32));
    }
};

// Number `at` of a matrix whose rows are whole blocks.
template <class F> DEVICE float number(const F *from, i64 at) { return from[at / F::UNIT].at(int(at % F::UNIT)); }

// Rows of packed numbers, `stride` numbers apart, into rows of floats that follow one another.
template <class F> DEVICE void unpack_rows(const F *from, i64 stride, float *to, int rows, int length) {
    i64 at = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < i64(rows) * length) to[at] = number(from, at / length * stride + at % length);
}
