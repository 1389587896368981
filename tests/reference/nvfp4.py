"""Blocks of `nvfp4` by the definition alone, in exact fractions: `python tests/reference/nvfp4.py > tests/goldens/formats/nvfp4.txt`.

The definition is that of NVIDIA's Model Optimizer: a number is `e · s · t`, `e` in E2M1, `s` in E4M3 for 16 numbers, `t` in f32 for the
tensor, the largest number by 6 · 448; `s` is the largest of the 16 by 6 and `t`, and both are rounded to the nearest. Blocks are laid out as
llama.cpp does it (`block_nvfp4`). Every code is tried; nothing is shared with the program. A line is a row: the numbers, the bytes, and the
numbers that the bytes stand for, in hexadecimal digits of their little-endian f32.
"""

import random
import struct
from fractions import Fraction

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction(m, 512) for m in range(8)] + [(1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)]
E4M3 = E4M3[:-1]  # the last code is NaN


def f32(x):
    """A fraction rounded to f32."""
    return Fraction(struct.unpack("<f", struct.pack("<f", float(x)))[0])


def nearest(codes, x):
    """The code of the nearest number, the even one of two."""
    return min(range(len(codes)), key=lambda i: (abs(codes[i] - x), i % 2))


def block(part, t):
    """The scale's code and the codes of 16 numbers."""
    scale = nearest(E4M3, max(map(abs, part)) / 6 / t)
    s = E4M3[scale] * t
    signed = lambda x: nearest(E2M1, abs(x) / s) if s else 0
    return scale, [signed(x) + (8 if x < 0 and signed(x) else 0) for x in part]


def row(numbers, t):
    """The bytes of a row and its numbers."""
    data, back = struct.pack("<f", float(t)), []
    for at in range(0, len(numbers), 64):
        parts = [block(numbers[i : i + 16], t) for i in range(at, at + 64, 16)]
        data += bytes(scale for scale, _ in parts)
        for scale, codes in parts:
            data += bytes(codes[i] | codes[i + 8] << 4 for i in range(8))
            back += [f32(f32(E4M3[scale] * t) * (-1 if c & 8 else 1) * E2M1[c & 7]) for c in codes]
    return data, back


def main():
    draw = random.Random(4)
    # Blocks of very different sizes: some of their scales are below the normal numbers of E4M3.
    rows = [[f32(draw.gauss(0, 0.02 * 10 ** -draw.choice((0, 0, 1, 2, 4)))) for _ in range(128)] for _ in range(6)]
    for r in rows:
        for at in range(0, 128, 16):
            by = Fraction(1, draw.choice((1, 2, 50, 3000, 10**7)))
            r[at : at + 16] = [f32(x * by) for x in r[at : at + 16]]
    t = f32(max(abs(x) for r in rows for x in r) / (6 * 448))
    for r in rows:
        data, back = row(r, t)
        digits = lambda numbers: b"".join(struct.pack("<f", float(x)) for x in numbers).hex()
        print(digits(r), data.hex(), digits(back))


if __name__ == "__main__":
    main()
