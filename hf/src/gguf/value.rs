//! Values of the metadata of a GGUF file.

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number of any width, and the code of its type.
    Whole(i128, u32),
    /// A number in 32 bits.
    F32(f32),
    /// A number in 64 bits.
    F64(f64),
    /// True or false.
    Bool(bool),
    /// A text.
    Text(String),
    /// Values of one type, whose code is this.
    Array(u32, Vec<Value>),
}

/// Codes of types of values.
pub mod code {
    /// Bytes.
    pub const U8: u32 = 0;
    /// 32 bits without a sign.
    pub const U32: u32 = 4;
    /// 32 bits with a sign.
    pub const I32: u32 = 5;
    /// 32 bits of floating point.
    pub const F32: u32 = 6;
    /// True or false, in a byte.
    pub const BOOL: u32 = 7;
    /// A text.
    pub const TEXT: u32 = 8;
    /// An array.
    pub const ARRAY: u32 = 9;
    /// 64 bits without a sign.
    pub const U64: u32 = 10;
    /// 64 bits with a sign.
    pub const I64: u32 = 11;
    /// 64 bits of floating point.
    pub const F64: u32 = 12;
}

/// Bytes of a value of a fixed size, and whether it is a number with a sign; by its type's code.
pub fn width(of: u32) -> Option<(usize, bool)> {
    // U8, I8, U16, I16, U32, I32, F32, BOOL, then TEXT and ARRAY, U64, I64, F64.
    match of {
        code::U8 | code::BOOL => Some((1, false)),
        1 => Some((1, true)),
        2 => Some((2, false)),
        3 => Some((2, true)),
        code::U32 => Some((4, false)),
        code::I32 | code::F32 => Some((4, true)),
        code::U64 => Some((8, false)),
        code::I64 | code::F64 => Some((8, true)),
        _ => None,
    }
}

impl Value {
    /// A number of 32 bits.
    pub fn whole(x: u64) -> Self {
        let of = if u32::try_from(x).is_ok() { code::U32 } else { code::U64 };
        Value::Whole(x.into(), of)
    }

    /// Texts.
    pub fn texts(all: impl IntoIterator<Item = String>) -> Self {
        Value::Array(code::TEXT, all.into_iter().map(Value::Text).collect())
    }

    /// The code of its type.
    pub fn code(&self) -> u32 {
        match self {
            Value::Whole(_, of) => *of,
            Value::F32(_) => code::F32,
            Value::F64(_) => code::F64,
            Value::Bool(_) => code::BOOL,
            Value::Text(_) => code::TEXT,
            Value::Array(..) => code::ARRAY,
        }
    }

    /// Appends its bytes.
    pub fn write(&self, to: &mut Vec<u8>) {
        match self {
            Value::Whole(x, of) => {
                let bytes = width(*of).map_or(0, |(bytes, _)| bytes);
                to.extend(&x.to_le_bytes()[..bytes]);
            }
            Value::F32(x) => to.extend(x.to_le_bytes()),
            Value::F64(x) => to.extend(x.to_le_bytes()),
            Value::Bool(x) => to.push(u8::from(*x)),
            Value::Text(x) => text(x, to),
            Value::Array(of, all) => {
                to.extend(of.to_le_bytes());
                to.extend((all.len() as u64).to_le_bytes());
                all.iter().for_each(|x| x.write(to));
            }
        }
    }

    /// A whole number, not below zero.
    pub fn as_whole(&self) -> Option<u64> {
        match self {
            Value::Whole(x, _) => u64::try_from(*x).ok(),
            _ => None,
        }
    }

    /// A number.
    pub fn as_real(&self) -> Option<f64> {
        match self {
            Value::Whole(x, _) => Some(*x as f64),
            // As people write it: 0.00001, not the f32 nearest to it.
            Value::F32(x) => x.to_string().parse().ok(),
            Value::F64(x) => Some(*x),
            _ => None,
        }
    }

    /// A text.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Value::Text(x) => Some(x),
            _ => None,
        }
    }

    /// True or false.
    pub fn as_flag(&self) -> Option<bool> {
        match self {
            Value::Bool(x) => Some(*x),
            _ => None,
        }
    }

    /// Its values.
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Value::Array(_, all) => Some(all),
            _ => None,
        }
    }
}

/// Appends a text with its length.
pub fn text(x: &str, to: &mut Vec<u8>) {
    to.extend((x.len() as u64).to_le_bytes());
    to.extend(x.as_bytes());
}
