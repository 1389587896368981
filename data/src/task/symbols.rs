//! Symbols of vocabularies: one character while letters and digits last, then as many as it takes,
//! the same number for every symbol of a vocabulary.

/// Letters and digits, in the order in which symbols are numbered.
const CHARACTERS: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

/// Symbol `i` of a vocabulary of `size`.
pub fn symbol(i: u64, size: u64) -> String {
    digits(i, size, CHARACTERS)
}

/// Symbol `i` of a vocabulary of `size`, in lower-case letters.
pub fn lower(i: u64, size: u64) -> String {
    digits(i, size, &CHARACTERS[..26])
}

/// Symbol `i` of a vocabulary of `size`, in upper-case letters.
pub fn upper(i: u64, size: u64) -> String {
    digits(i, size, &CHARACTERS[26..52])
}

/// A number in characters, as many as the largest of the vocabulary takes.
fn digits(i: u64, size: u64, characters: &[u8]) -> String {
    let base = characters.len() as u64;
    let (mut width, mut covers) = (1, base);
    while covers < size {
        (width, covers) = (width + 1, covers.saturating_mul(base));
    }
    let mut text = vec![0; width];
    let mut left = i;
    for place in text.iter_mut().rev() {
        *place = characters[(left % base) as usize];
        left /= base;
    }
    text.into_iter().map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn symbols_of_a_vocabulary_differ_and_have_one_width() {
        for size in [2, 26, 27, 62, 63, 4096] {
            for of in [symbol, lower, upper] {
                let all: HashSet<String> = (0..size).map(|i| of(i, size)).collect();
                let width = of(0, size).len();
                assert_eq!(all.len(), size as usize);
                assert!(all.iter().all(|s| s.len() == width));
            }
        }
        assert_eq!((symbol(61, 62), symbol(62, 63), lower(26, 27)), ("9".into(), "ba".into(), "ba".into()));
    }
}
