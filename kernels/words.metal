#include <metal_stdlib>
#include <metal_atomic>

// The words of kernel statements in Metal (`compiler/src/statement`); `words.cuh` has the same. The
// widest float has 32 bits, so angles of late positions are less exact than elsewhere.
typedef uchar u8;
typedef ushort u16;
typedef uint u32;
typedef long i64;
typedef float Wide;
struct bf16 {
    u16 bits;
};

#define DEVICE inline
#define TABLE constant
#define thread_number() i64(thread_of_grid)

DEVICE u32 bits_of(float x) { return as_type<uint>(x); }
DEVICE float float_of(u32 bits) { return as_type<float>(bits); }
DEVICE float __int_as_float(int bits) { return as_type<float>(bits); }
DEVICE float product_of(float a, float b) { return a * b; }
DEVICE float difference_of(float a, float b) { return a - b; }
DEVICE void report(device int *status, int launch) {
    metal::atomic_fetch_min_explicit((device metal::atomic_int *)status, launch, metal::memory_order_relaxed);
}
DEVICE float value(device const bf16 &x) { return float_of(u32(x.bits) << 16); }
DEVICE void put(device bf16 *to, float x) {
    u32 bits = bits_of(x);
    to->bits = x == x ? u16((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16) : u16(0x7fff);
}
DEVICE void absent(device bf16 *to) { to->bits = 0x8000; }
DEVICE float expf(float x) { return metal::precise::exp(x); }
DEVICE float logf(float x) { return metal::precise::log(x); }
DEVICE float tanhf(float x) { return metal::precise::tanh(x); }
DEVICE float sqrtf(float x) { return metal::precise::sqrt(x); }
DEVICE float floorf(float x) { return metal::floor(x); }
DEVICE float fabsf(float x) { return metal::fabs(x); }
DEVICE float sinf(float x) { return metal::precise::sin(x); }
DEVICE float cosf(float x) { return metal::precise::cos(x); }
DEVICE float fmaxf(float a, float b) { return metal::fmax(a, b); }
DEVICE float fmaf(float a, float b, float c) { return metal::fma(a, b, c); }
DEVICE float sqrt(float x) { return metal::precise::sqrt(x); }
DEVICE float floor(float x) { return metal::floor(x); }
