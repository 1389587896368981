"""Reads Metal texts with Clang: `check.py FOLDER` prints what is wrong with each `*.metal` in it.

Metal's own compiler is Apple's and runs on their systems alone. Its language is C++14 with address
spaces, which Clang has as an attribute; `metal_stdlib` here declares what our texts use. So types,
names and address spaces are checked, and that the library's functions have these types is taken from
Apple's Metal Shading Language Specification, its chapters on address spaces, math and atomic functions.
"""

import sys
from pathlib import Path

import clang.cindex

STDLIB = """
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2))) const
#define kernel extern "C"
template <class To, class From> To as_type(From from) { return __builtin_bit_cast(To, from); }
namespace metal {
struct atomic_int { int of; };
enum memory_order { memory_order_relaxed };
int atomic_fetch_min_explicit(volatile device atomic_int *, int, memory_order);
float floor(float);
float fabs(float);
float fmax(float, float);
float fma(float, float, float);
namespace precise {
float exp(float);
float log(float);
float tanh(float);
float sqrt(float);
float sin(float);
float cos(float);
}
}
// The language has no type of 64 bits for floats.
#define double no_double
"""


def main():
    folder = Path(sys.argv[1])
    shim = folder / "include"
    shim.mkdir()
    (shim / "metal_stdlib").write_text(STDLIB)
    (shim / "metal_atomic").write_text("")
    # Attributes of arguments are Metal's own, and unknown to Clang.
    flags = ["-x", "c++", "-std=c++14", "-fsyntax-only", "-Wall", "-Wno-unknown-attributes", "-Wno-ignored-attributes"]
    flags += ["-Wno-unused", "-Wno-parentheses", "-Wdouble-promotion", "-I", str(shim)]
    index = clang.cindex.Index.create()
    for path in sorted(folder.glob("*.metal")):
        found = index.parse(str(path), args=flags).diagnostics
        if len(found) > 0:
            print(f"{path.name}: {found[0]}")


main()
