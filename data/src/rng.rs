//! Random numbers that are a function of (seed, purpose, position).
//!
//! *In*: a seed, what the numbers are for, a position. *Out*: the same bits whatever was drawn
//! before, on whatever thread or device. *Promise*: no hidden state anywhere, so that a resumed run
//! draws what the uninterrupted one would have drawn.
//!
//! The generator is Philox4x32-10 (Salmon et al., 2011).

/// A keyed function from 128-bit counters to 128 random bits.
#[derive(Clone, Copy, Debug)]
pub struct Philox {
    key: [u32; 2],
}

impl Philox {
    /// The generator of this seed for this purpose; generators of different purposes are unrelated.
    pub fn new(seed: u64, purpose: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.update(purpose.as_bytes());
        let hash = hasher.finalize();
        let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|k| hash.as_bytes()[4 * i + k]));
        Philox { key: [word(0), word(1)] }
    }

    /// The key, by which others can draw the same.
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// The 128 bits at counter `(high, low)`.
    pub fn block(&self, high: u64, low: u64) -> [u32; 4] {
        let mut c = [low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32];
        let mut key = self.key;
        for _ in 0..10 {
            let (p0, p1) = (u64::from(c[0]) * 0xD251_1F53, u64::from(c[2]) * 0xCD9E_8D57);
            c = [(p1 >> 32) as u32 ^ c[1] ^ key[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ key[1], p0 as u32];
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        c
    }

    /// 64 bits at counter `(high, low)`.
    pub fn bits(&self, high: u64, low: u64) -> u64 {
        let b = self.block(high, low);
        u64::from(b[0]) | u64::from(b[1]) << 32
    }

    /// The stream of numbers number `index`.
    pub fn stream(&self, index: u64) -> Stream {
        Stream { philox: *self, index, next: 0 }
    }
}

/// Uniform in `(0, 1]` from 64 bits.
pub fn unit_open(bits: u64) -> f64 {
    ((bits >> 11) + 1) as f64 / (1u64 << 53) as f64
}

/// Numbers drawn one after another.
#[derive(Clone, Debug)]
pub struct Stream {
    philox: Philox,
    index: u64,
    next: u64,
}

impl Stream {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.next += 1;
        self.philox.bits(self.index, self.next - 1)
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `0..n`; 0 where `n` is 0. Unbiased: words of the incomplete last range are drawn
    /// again.
    pub fn below(&mut self, n: u64) -> u64 {
        if n == 0 {
            return 0;
        }
        let excess = (u64::MAX % n + 1) % n;
        loop {
            let bits = self.bits();
            if bits <= u64::MAX - excess {
                return bits % n;
            }
        }
    }
}

/// A permutation of `0..n` that is a function of a generator: position to element, in no memory.
///
/// A Feistel network permutes the smallest even power of two not below `n`; elements beyond `n` are
/// walked on until one falls inside, which keeps it a permutation of `0..n`.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    philox: Philox,
    high: u64,
    n: u64,
    half: u32,
}

impl Permutation {
    /// Permutation number `index` of `0..n`.
    pub fn new(philox: Philox, index: u64, n: u64) -> Self {
        let bits = 64 - n.saturating_sub(1).leading_zeros();
        Permutation { philox, high: index, n, half: bits.div_ceil(2).max(1) }
    }

    /// The element at position `i < n`.
    pub fn at(&self, i: u64) -> u64 {
        debug_assert!(i < self.n);
        let mask = (1u64 << self.half) - 1;
        let mut x = i;
        loop {
            let (mut left, mut right) = (x >> self.half, x & mask);
            for round in 0..6u64 {
                let f = self.philox.bits(self.high, round << 32 | right) & mask;
                (left, right) = (right, left ^ f);
            }
            x = left << self.half | right;
            if x < self.n {
                return x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        let zero = Philox { key: [0, 0] };
        assert_eq!(zero.block(0, 0), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        let ones = Philox { key: [u32::MAX; 2] };
        assert_eq!(ones.block(u64::MAX, u64::MAX), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let pi = Philox { key: [0xa4093822, 0x299f31d0] };
        assert_eq!(
            pi.block(0x0370_7344_1319_8a2e, 0x85a3_08d3_243f_6a88),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn permutations_are_permutations_and_differ_by_index() {
        for n in [1u64, 2, 3, 7, 64, 100, 1000] {
            let philox = Philox::new(3, "order");
            let order: Vec<u64> = (0..n).map(|i| Permutation::new(philox, 0, n).at(i)).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..n).collect::<Vec<_>>());
            if n >= 64 {
                assert_ne!(order, (0..n).map(|i| Permutation::new(philox, 1, n).at(i)).collect::<Vec<_>>());
                assert_ne!(order, sorted);
            }
        }
    }

    #[test]
    fn below_is_bounded_and_reaches_everything() {
        let mut stream = Philox::new(0, "test").stream(0);
        let mut seen = [0; 7];
        for _ in 0..700 {
            seen[stream.below(7) as usize] += 1;
        }
        assert!(seen.iter().all(|&n| n > 50), "{seen:?}");
        assert_eq!(stream.below(0), 0);
    }
}
