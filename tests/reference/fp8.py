"""Matmuls that read e4m3, by their definition alone: `python tests/reference/fp8.py > tests/goldens/formats/fp8.txt`.

The definition is docs/fp8.md: numbers of a tile are rounded to the nearest of e4m3, ties to the even code, in units of the least power of two
at which none is above 448. The forward reads rows of activations in tiles of 128 numbers along the sum and the weight in tiles of 128 by 128;
the derivative of activations reads rows of cotangents, and the same weight; that of the weight reads columns of both in tiles of 128 tokens,
which begin anew with each expert. Activations and cotangents are bf16, as is what the first two give. Rounding is by search among all codes,
in exact fractions; nothing is shared with the program. A line is a number: its name, its place, and the number in hexadecimal.
"""

import math
import struct
from fractions import Fraction

CODES = [Fraction(m, 512) for m in range(8)] + [(1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)]
CODES = CODES[:-1]  # the last code is NaN
TILE = 128


def bf16(x):
    """The nearest bf16, ties to even."""
    m, e = math.frexp(x)
    return math.ldexp(round(Fraction(m) * 256), e - 8)


def e4m3(x, unit, known={}):
    """A number rounded in units of a power of two."""
    size = abs(Fraction(x)) / unit
    if size not in known:
        low, high = 0, len(CODES) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if CODES[middle] <= size else (low, middle)
        known[size] = CODES[min((low, high), key=lambda i: (abs(CODES[i] - size), i % 2))]
    return math.copysign(float(known[size] * unit), x)


def tile(numbers):
    """The numbers of a tile, rounded."""
    largest, unit = max(abs(Fraction(x)) for x in numbers), Fraction(1, 2**100)
    while largest > 448 * unit:
        unit *= 2
    return [e4m3(x, unit) for x in numbers]


def pieces(first, last):
    return [(at, min(at + TILE, last)) for at in range(first, last, TILE)]


def along(row):
    """A row in tiles along itself."""
    return [y for a, b in pieces(0, len(row)) for y in tile(row[a:b])]


def across(rows, groups):
    """Columns of rows in tiles of a group's rows."""
    out = [row[:] for row in rows]
    for first, last in groups:
        for a, b in pieces(first, last):
            for c in range(len(rows[0])):
                for r, y in zip(range(a, b), tile([row[c] for row in rows[a:b]])):
                    out[r][c] = y
    return out


def square(rows):
    """A matrix in tiles of both."""
    out = [row[:] for row in rows]
    for a, b in pieces(0, len(rows)):
        for c, d in pieces(0, len(rows[0])):
            flat = tile([x for row in rows[a:b] for x in row[c:d]])
            for i, r in enumerate(range(a, b)):
                out[r][c:d] = flat[i * (d - c) : (i + 1) * (d - c)]
    return out


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b))


def transposed(rows):
    return [list(column) for column in zip(*rows)]


def numbers(rows, columns, seed):
    """Numbers that both sides can make, rows and columns of very different sizes."""
    made = lambda i: ((i * 2654435761 + seed * 40503) % 2**32) % 2001 - 1000
    return [[math.ldexp(made(r * columns + c), -10 - r % 5 * 4 - c // 40 % 4 * 4) for c in range(columns)] for r in range(rows)]


def linear(name, x, weights, dy, groups):
    """A matrix for each group of rows, forward and back."""
    x, dy = [[[bf16(v) for v in row] for row in rows] for rows in (x, dy)]
    rounded = [square(w) for w in weights]
    x_along, d_along = [[along(row) for row in rows] for rows in (x, dy)]
    x_across, d_across = across(x, groups), across(dy, groups)
    zero = lambda columns: [0.0] * columns
    y, dx = [zero(len(dy[0])) for _ in x], [zero(len(x[0])) for _ in x]
    dw = []
    for (first, last), w in zip(groups, rounded):
        turned = transposed(w)
        for r in range(first, last):
            y[r] = [bf16(dot(x_along[r], line)) for line in w]
            dx[r] = [bf16(dot(d_along[r], line)) for line in turned]
        columns = [transposed(rows[first:last]) if last > first else [[]] * len(rows[0]) for rows in (d_across, x_across)]
        dw += [[dot(a, b) for b in columns[1]] for a in columns[0]]
    for what, rows in (("y", y), ("dx", dx), ("dw", dw)):
        flat = [v for row in rows for v in row]
        for at in range(0, len(flat), max(1, len(flat) // 211)):
            print(f"{name}.{what}", at, struct.pack(">d", flat[at]).hex())


def main():
    tokens, inner, outer = 140, 130, 150
    linear("dense", numbers(tokens, inner, 1), [numbers(outer, inner, 2)], numbers(tokens, outer, 3), [(0, tokens)])
    slots, outer, groups = 260, 20, [(0, 100), (100, 100), (100, 240)]
    weights = [numbers(outer, inner, 5 + e) for e in range(3)]
    linear("grouped", numbers(slots, inner, 4), weights, numbers(slots, outer, 9), groups)


if __name__ == "__main__":
    main()
