//! The pickle of a state dict, read as data.
//!
//! *In*: the bytes of `data.pkl`. *Out*: names and tensors, each a range of a storage. *Promise*:
//! nothing is run, whatever the bytes say: of what a pickle may call, four functions that make
//! tensors are known and their meaning is written here; a pickle that calls anything else is
//! refused with its name. Values are in one list and refer to each other by number, so that no
//! nesting is too deep.

use dreamc_runtime::checkpoint::safetensors::Dtype;
use std::collections::HashMap;
use std::sync::Arc;

/// A tensor of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    /// The name of its storage's file.
    pub(super) storage: Arc<str>,
    /// Type of its elements.
    pub(super) dtype: Dtype,
    /// The element of the storage that is its first.
    pub(super) first: u64,
    /// Sizes, slowest first.
    pub(super) shape: Vec<u64>,
    /// Elements from one to the next along each.
    pub(super) strides: Vec<u64>,
}

/// A function or type that a pickle may name.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Global {
    /// `collections.OrderedDict`.
    Dict,
    /// `torch._utils._rebuild_tensor_v2`.
    Tensor,
    /// `torch._utils._rebuild_parameter`.
    Parameter,
    /// A type of storages.
    Storage(Dtype),
}

impl Global {
    fn of(module: &str, name: &str) -> Option<Global> {
        let storage = |name: &str| {
            Some(match name {
                "FloatStorage" => Dtype::F32,
                "HalfStorage" => Dtype::F16,
                "BFloat16Storage" => Dtype::BF16,
                "DoubleStorage" => Dtype::F64,
                "LongStorage" => Dtype::I64,
                "IntStorage" => Dtype::I32,
                "ShortStorage" => Dtype::I16,
                "CharStorage" => Dtype::I8,
                "ByteStorage" => Dtype::U8,
                "BoolStorage" => Dtype::BOOL,
                _ => return None,
            })
        };
        match (module, name) {
            ("collections", "OrderedDict") => Some(Global::Dict),
            ("torch._utils", "_rebuild_tensor_v2") => Some(Global::Tensor),
            ("torch._utils", "_rebuild_parameter") => Some(Global::Parameter),
            ("torch", name) => storage(name).map(Global::Storage),
            _ => None,
        }
    }
}

/// A value; containers are numbers of [`Machine::lists`].
#[derive(Clone, Debug, PartialEq)]
enum Value {
    /// None, a truth value, or a number with a fraction: nothing that a tensor is made of.
    Other,
    Whole(i64),
    Text(Arc<str>),
    Global(Global),
    /// Its file and its type.
    Storage(Arc<str>, Dtype),
    Tensor(Arc<Tensor>),
    Tuple(usize),
    List(usize),
    /// Keys and values in turns.
    Dict(usize),
    /// The beginning of a run of values.
    Mark,
}

/// Most values that a pickle makes.
const MOST: usize = 1 << 22;

/// Most dimensions of a tensor.
const MOST_DIMENSIONS: usize = 8;

struct Machine<'a> {
    bytes: &'a [u8],
    stack: Vec<Value>,
    lists: Vec<Vec<Value>>,
    memo: HashMap<u32, Value>,
    made: usize,
}

type Result<T> = std::result::Result<T, String>;

const CUT: &str = "ends in the middle of its pickle";
const ODD: &str = "has a pickle that is not that of a dict of tensors";

/// Reads a dict of tensors.
pub(super) fn read(bytes: &[u8]) -> Result<Vec<(String, Tensor)>> {
    let mut m = Machine { bytes, stack: vec![], lists: vec![], memo: HashMap::new(), made: 0 };
    while m.step()? {}
    let top = m.stack.pop();
    let Some(Value::Dict(dict)) = top.filter(|_| m.stack.is_empty()) else { return Err(ODD.into()) };
    let mut found = vec![];
    for pair in m.lists[dict].chunks(2) {
        let [Value::Text(name), value] = pair else { return Err(ODD.into()) };
        match value {
            Value::Tensor(tensor) => found.push((name.to_string(), (**tensor).clone())),
            Value::Dict(_) => {
                return Err(format!(
                    "has a dict `{name}` among its tensors: it is a checkpoint of training; the model's own dict alone is imported"
                ));
            }
            _ => return Err(format!("has `{name}` among its tensors, which is none")),
        }
    }
    Ok(found)
}

impl Machine<'_> {
    fn take(&mut self, n: usize) -> Result<&[u8]> {
        let (taken, rest) = self.bytes.split_at_checked(n).ok_or(CUT)?;
        self.bytes = rest;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| CUT.to_string())
    }

    /// A line of text.
    fn line(&mut self) -> Result<String> {
        let end = self.bytes.iter().position(|b| *b == b'\n').ok_or(CUT)?;
        let line = String::from_utf8_lossy(self.take(end)?).into_owned();
        self.take(1)?;
        Ok(line)
    }

    fn text(&mut self, n: usize) -> Result<Value> {
        let bytes = self.take(n)?;
        Ok(Value::Text(std::str::from_utf8(bytes).map_err(|_| ODD)?.into()))
    }

    fn push(&mut self, value: Value) -> Result<()> {
        self.made += 1;
        if self.made > MOST {
            return Err(format!("makes more than {MOST} values"));
        }
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value> {
        self.stack.pop().filter(|v| *v != Value::Mark).ok_or_else(|| ODD.into())
    }

    /// The values after the last mark.
    fn run(&mut self) -> Result<Vec<Value>> {
        let mark = self.stack.iter().rposition(|v| *v == Value::Mark).ok_or(ODD)?;
        let run = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(run)
    }

    fn container(&mut self, of: Vec<Value>, make: fn(usize) -> Value) -> Result<()> {
        self.lists.push(of);
        self.push(make(self.lists.len() - 1))
    }

    fn tuple(&mut self, n: usize) -> Result<()> {
        let from = self.stack.len().checked_sub(n).ok_or(ODD)?;
        let of = self.stack.split_off(from);
        if of.contains(&Value::Mark) { Err(ODD.into()) } else { self.container(of, Value::Tuple) }
    }

    /// Adds to the dict, or the list, on top.
    fn add(&mut self, values: Vec<Value>, pairs: bool) -> Result<()> {
        match (self.stack.last(), pairs) {
            (Some(&Value::Dict(to)), true) if values.len().is_multiple_of(2) => self.lists[to].extend(values),
            (Some(&Value::List(to)), false) => self.lists[to].extend(values),
            _ => return Err(ODD.into()),
        }
        Ok(())
    }

    fn remember(&mut self, number: u32) -> Result<()> {
        let top = self.stack.last().ok_or(ODD)?.clone();
        if self.memo.len() > MOST {
            return Err(format!("makes more than {MOST} values"));
        }
        self.memo.insert(number, top);
        Ok(())
    }

    fn recall(&mut self, number: u32) -> Result<()> {
        let value = self.memo.get(&number).ok_or(ODD)?.clone();
        self.push(value)
    }

    fn global(&mut self, module: &str, name: &str) -> Result<()> {
        let known = Global::of(module, name).ok_or_else(|| {
            format!(
                "calls {module}.{name}, which makes no tensor: a pickle is a program, and one that does more than to name tensors is not read; \
                 nothing of it was run"
            )
        })?;
        self.push(Value::Global(known))
    }

    /// One instruction; false for the last.
    fn step(&mut self) -> Result<bool> {
        match self.number::<1>()?[0] {
            b'.' => return Ok(false),
            // The protocol, and lengths of frames, say nothing about values.
            0x80 => {
                self.take(1)?;
            }
            0x95 => {
                self.take(8)?;
            }
            b'(' => self.push(Value::Mark)?,
            b'0' => drop(self.pop()?),
            b'N' | 0x88 | 0x89 => self.push(Value::Other)?,
            b'G' => {
                self.take(8)?;
                self.push(Value::Other)?;
            }
            b'K' => {
                let n = self.number::<1>()?[0];
                self.push(Value::Whole(n.into()))?;
            }
            b'M' => {
                let n = u16::from_le_bytes(self.number()?);
                self.push(Value::Whole(n.into()))?;
            }
            b'J' => {
                let n = i32::from_le_bytes(self.number()?);
                self.push(Value::Whole(n.into()))?;
            }
            0x8a => self.long()?,
            b'X' => {
                let n = u32::from_le_bytes(self.number()?);
                let text = self.text(n as usize)?;
                self.push(text)?;
            }
            0x8c => {
                let n = self.number::<1>()?[0];
                let text = self.text(n.into())?;
                self.push(text)?;
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(&module, &name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (Value::Text(module), Value::Text(name)) = (module, name) else { return Err(ODD.into()) };
                self.global(&module, &name)?;
            }
            b'q' => {
                let n = self.number::<1>()?[0];
                self.remember(n.into())?;
            }
            b'r' => {
                let n = u32::from_le_bytes(self.number()?);
                self.remember(n)?;
            }
            0x94 => self.remember(self.memo.len() as u32)?,
            b'h' => {
                let n = self.number::<1>()?[0];
                self.recall(n.into())?;
            }
            b'j' => {
                let n = u32::from_le_bytes(self.number()?);
                self.recall(n)?;
            }
            b')' => self.tuple(0)?,
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b't' => {
                let run = self.run()?;
                self.container(run, Value::Tuple)?;
            }
            b'}' => self.container(vec![], Value::Dict)?,
            b']' => self.container(vec![], Value::List)?,
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.add(vec![key, value], true)?;
            }
            b'u' => {
                let run = self.run()?;
                self.add(run, true)?;
            }
            b'a' => {
                let value = self.pop()?;
                self.add(vec![value], false)?;
            }
            b'e' => {
                let run = self.run()?;
                self.add(run, false)?;
            }
            b'Q' => self.storage()?,
            b'R' => self.call()?,
            // Attributes of a dict: versions of its modules.
            b'b' => {
                self.pop()?;
                if !matches!(self.stack.last(), Some(Value::Dict(_))) {
                    return Err(ODD.into());
                }
            }
            other => {
                return Err(format!(
                    "has an instruction {other:#04x} in its pickle that no dict of tensors has"
                ));
            }
        }
        Ok(true)
    }

    /// A whole number of a few bytes.
    fn long(&mut self) -> Result<()> {
        let n = self.number::<1>()?[0] as usize;
        let bytes = self.take(n)?;
        if bytes.len() > 8 {
            return Err(ODD.into());
        }
        let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
        let mut all = [fill; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Whole(i64::from_le_bytes(all)))
    }

    fn tuple_of(&self, value: &Value) -> Result<&[Value]> {
        match value {
            Value::Tuple(of) => Ok(&self.lists[*of]),
            _ => Err(ODD.into()),
        }
    }

    /// `("storage", type, file, device, elements)` becomes a storage.
    fn storage(&mut self) -> Result<()> {
        let of = self.pop()?;
        let storage = match self.tuple_of(&of)? {
            [
                Value::Text(kind),
                Value::Global(Global::Storage(dtype)),
                Value::Text(file),
                _,
                Value::Whole(_),
            ] if &**kind == "storage" => Value::Storage(file.clone(), *dtype),
            _ => return Err(ODD.into()),
        };
        self.push(storage)
    }

    /// Calls a function that is known.
    fn call(&mut self) -> Result<()> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let Value::Global(function) = function else { return Err(ODD.into()) };
        let of = self.tuple_of(&arguments)?;
        let made = match (function, of) {
            (Global::Dict, []) => return self.container(vec![], Value::Dict),
            (Global::Tensor, [Value::Storage(storage, dtype), Value::Whole(first), shape, strides, ..]) => {
                let numbers = |of: &Value| -> Result<Vec<u64>> {
                    let whole = |v: &Value| match v {
                        Value::Whole(n) => u64::try_from(*n).map_err(|_| ODD.to_string()),
                        _ => Err(ODD.into()),
                    };
                    self.tuple_of(of)?.iter().take(MOST_DIMENSIONS + 1).map(whole).collect()
                };
                let first = u64::try_from(*first).map_err(|_| ODD)?;
                let (shape, strides) = (numbers(shape)?, numbers(strides)?);
                if shape.len() != strides.len() || shape.len() > MOST_DIMENSIONS {
                    return Err(ODD.into());
                }
                let (storage, dtype) = (storage.clone(), *dtype);
                Value::Tensor(Arc::new(Tensor { storage, dtype, first, shape, strides }))
            }
            (Global::Parameter, [tensor @ Value::Tensor(_), ..]) => tensor.clone(),
            _ => return Err(ODD.into()),
        };
        self.push(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A dict of one tensor as `torch.save` writes it, the storage called `0`.
    fn dict() -> Vec<u8> {
        let text = |s: &str| [b"X".as_slice(), &(s.len() as u32).to_le_bytes(), s.as_bytes()].concat();
        let mut p = b"\x80\x02}(".to_vec();
        p.extend(text("w"));
        p.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        p.extend(text("storage"));
        p.extend(b"ctorch\nBFloat16Storage\n");
        p.extend([text("0"), text("cpu")].concat());
        p.extend(b"K\x06tQK\x00K\x02K\x03\x86K\x03K\x01\x86\x89ccollections\nOrderedDict\n)RtRu.");
        p
    }

    #[test]
    fn a_dict_of_tensors_is_read() {
        let (shape, strides) = (vec![2, 3], vec![3, 1]);
        let tensor = Tensor { storage: "0".into(), dtype: Dtype::BF16, first: 0, shape, strides };
        assert_eq!(read(&dict()), Ok(vec![("w".to_string(), tensor)]));
    }

    #[test]
    fn calls_of_anything_else_are_refused_by_name() {
        for (pickle, name) in [
            (&b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."[..], "os.system"),
            (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "builtins.eval"),
            (b"\x80\x02ctorch\nload\n.", "torch.load"),
        ] {
            let error = read(pickle).unwrap_err();
            assert!(error.contains(&format!("calls {name}, which makes no tensor")), "{error}");
        }
    }

    #[test]
    fn whatever_bytes_there_are_nothing_panics() {
        let good = dict();
        for n in 0..good.len() {
            assert!(read(&good[..n]).is_err(), "cut to {n}");
            for value in 0..=255 {
                let mut damaged = good.clone();
                damaged[n] = value;
                let _ = read(&damaged);
            }
        }
        // As deep as there are bytes.
        let deep = [b")".as_slice(), &[0x85].repeat(1 << 20), b"."].concat();
        assert!(read(&deep).is_err());
    }
}
