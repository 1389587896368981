//! From inputs that are good to inputs that are almost good.

use super::targets;
use dreamc_data::rng::Stream;

/// Longest input that is made.
const LONGEST: usize = 1 << 17;

/// Numbers at the edges of what fields hold.
const NUMBERS: [&str; 20] = [
    "0",
    "-1",
    "1",
    "-0",
    "255",
    "256",
    "65535",
    "65536",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "1e-320",
    "1e999",
    "0.5",
    "NaN",
];

/// Words of all the formats.
const WORDS: [&str; 48] = [
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "\"",
    "'",
    ":",
    ",",
    "- ",
    "\n",
    "\n  ",
    "\t",
    "\0",
    "#",
    "|",
    ">",
    "&a ",
    "*a ",
    "!!x ",
    "%",
    "=",
    "..",
    "../",
    "/etc/passwd",
    "null",
    "true",
    "[]",
    "{}",
    "\u{feff}",
    "é",
    "\u{1F980}",
    "\\u0000",
    "\\ud800",
    "\r\n",
    "@@ ",
    "%0",
    "@f",
    "f32",
    "recur",
    "skip(",
    "layer",
    "experts",
    "depth",
    "<<",
    "---",
    "...",
];

/// A changed copy of one of `corpus`.
pub fn mutate(corpus: &[Vec<u8>], random: &mut Stream) -> Vec<u8> {
    let pick = |random: &mut Stream| &corpus[random.below(corpus.len() as u64) as usize];
    let mut data = pick(random).clone();
    let most = 1 << random.below(4);
    let changes = 1 + random.below(most);
    for _ in 0..changes {
        change(&mut data, pick(random), random);
        data.truncate(LONGEST);
    }
    // Half of them with lengths that agree, so that the code after them is reached.
    if random.below(2) == 0 {
        repair(&mut data);
    }
    data
}

/// A place in `0..=length`.
fn place(length: usize, random: &mut Stream) -> usize {
    random.below(length as u64 + 1) as usize
}

/// A range of up to `most` bytes, mostly short.
fn range(length: usize, most: usize, random: &mut Stream) -> std::ops::Range<usize> {
    let from = place(length, random);
    let span = 1 << random.below(u64::from(usize::BITS - most.leading_zeros()));
    from..(from + place(span, random)).min(length)
}

fn change(data: &mut Vec<u8>, other: &[u8], random: &mut Stream) {
    let n = data.len();
    match random.below(13) {
        0 if n > 0 => data[place(n - 1, random)] ^= 1 << random.below(8),
        1 if n > 0 => {
            data[place(n - 1, random)] = [0, 0xFF, 0x7F, 0x80, b'0', b'\n', b'"'][random.below(7) as usize]
        }
        2 => {
            let word = WORDS[random.below(WORDS.len() as u64) as usize];
            let at = place(n, random);
            data.splice(at..at, word.bytes());
        }
        3 | 4 => number(data, random),
        5 => drop(data.drain(range(n, n, random))),
        6 => {
            // Again, and again: nesting, and lists that are too long.
            let from = range(n, 64, random);
            let piece = data[from.clone()].to_vec();
            let times = 1 << random.below(12);
            let many = piece.repeat(times.min(LONGEST / piece.len().max(1)));
            data.splice(from.end..from.end, many);
        }
        7 => {
            let (from, at) = (range(other.len(), other.len(), random), range(n, 64, random));
            data.splice(at, other[from].iter().copied());
        }
        8 => {
            let (from, to) = (range(n, 64, random), place(n, random));
            let piece = data[from].to_vec();
            data.splice(to..to, piece);
        }
        9 => data.truncate(place(n, random)),
        10 if n >= 8 => {
            let width = 1 << random.below(4);
            let at = place(n - width, random);
            let value = match random.below(4) {
                0 => u64::MAX,
                1 => 1 << random.below(64),
                2 => random.below(1 << 16),
                _ => (n as u64).wrapping_sub(random.below(16)),
            };
            data[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
        11 => word(data, other, random),
        _ => lines(data, random),
    }
}

/// Another number in place of one.
fn number(data: &mut Vec<u8>, random: &mut Stream) {
    let starts: Vec<usize> = (0..data.len())
        .filter(|&i| data[i].is_ascii_digit() && (i == 0 || !data[i - 1].is_ascii_digit()))
        .collect();
    if starts.is_empty() {
        return;
    }
    let from = starts[random.below(starts.len() as u64) as usize];
    let end = from + data[from..].iter().take_while(|b| b.is_ascii_digit() || **b == b'.').count();
    let new = match random.below(3) {
        0 => (random.bits() >> (63 - random.below(20))).to_string(),
        _ => NUMBERS[random.below(NUMBERS.len() as u64) as usize].to_string(),
    };
    data.splice(from..end, new.into_bytes());
}

/// A word of another input in place of one.
fn word(data: &mut Vec<u8>, other: &[u8], random: &mut Stream) {
    let find = |data: &[u8], random: &mut Stream| {
        let of = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        let starts: Vec<usize> =
            (0..data.len()).filter(|&i| of(data[i]) && (i == 0 || !of(data[i - 1]))).collect();
        let from = *starts.get(random.below(starts.len().max(1) as u64) as usize)?;
        Some(from..from + data[from..].iter().take_while(|b| of(**b)).count())
    };
    if let (Some(old), Some(new)) = (find(data, random), find(other, random)) {
        data.splice(old, other[new].iter().copied());
    }
}

/// A line twice, or not at all, or elsewhere.
fn lines(data: &mut Vec<u8>, random: &mut Stream) {
    let mut lines: Vec<Vec<u8>> = data.split_inclusive(|b| *b == b'\n').map(<[u8]>::to_vec).collect();
    if lines.is_empty() {
        return;
    }
    let (a, b) = (place(lines.len() - 1, random), place(lines.len() - 1, random));
    match random.below(3) {
        0 => lines.insert(b, lines[a].clone()),
        1 => drop(lines.remove(a)),
        _ => lines.swap(a, b),
    }
    *data = lines.concat();
}

/// Gives a safetensors file, or each of a folder's, the length of the header it has.
fn repair(data: &mut Vec<u8>) {
    if data.starts_with(b"@@ ") {
        let list: Vec<(String, Vec<u8>)> = targets::files(data)
            .into_iter()
            .map(|(name, content)| {
                let mut content = content.to_vec();
                if name.ends_with(".safetensors") {
                    repair(&mut content);
                }
                (name.to_string(), content)
            })
            .collect();
        *data = targets::join(list.iter().map(|(name, content)| (name.as_str(), content.as_slice())));
    } else if data.len() > 9 && data[8] == b'{' {
        let (mut depth, mut quoted, mut escaped) = (0i64, false, false);
        for (i, b) in data[8..].iter().enumerate() {
            match b {
                _ if escaped => escaped = false,
                b'\\' => escaped = quoted,
                b'"' => quoted = !quoted,
                b'{' if !quoted => depth += 1,
                b'}' if !quoted => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                let length = (i as u64 + 1).to_le_bytes();
                return data[..8].copy_from_slice(&length);
            }
        }
    }
}
