//! Messages of the Language Server Protocol: a header with the length, and JSON.
//!
//! *In*: bytes. *Out*: values. *Promise*: memory is bounded by [`MOST`], and bytes that are no
//! message are an error, not a panic.

use serde_json::{Value, json};
use std::io::{self, BufRead, Error, ErrorKind, Read};

/// The largest message: a document of the largest specification, with room for its escapes.
const MOST: u64 = 16 << 20;

/// The longest line of a header.
const LONGEST_LINE: u64 = 4096;

/// An error of the protocol, by its number.
pub struct Fault {
    pub code: i64,
    pub message: String,
}

impl Fault {
    pub fn new(code: i64, message: impl Into<String>) -> Fault {
        Fault { code, message: message.into() }
    }

    pub fn parse(message: impl Into<String>) -> Fault {
        Fault::new(-32700, message)
    }

    pub fn request(message: impl Into<String>) -> Fault {
        Fault::new(-32600, message)
    }

    pub fn method(name: &str) -> Fault {
        Fault::new(-32601, format!("`{name}` is not supported"))
    }

    /// A request that is understood and refused: editors show the message.
    pub fn refused(message: impl Into<String>) -> Fault {
        Fault::new(-32803, message)
    }

    pub fn parameters(message: impl Into<String>) -> Fault {
        Fault::new(-32602, message)
    }
}

/// The body of the next message; `None` at the end of the input.
pub fn read(input: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let bad = |what: &str| Error::new(ErrorKind::InvalidData, format!("standard input: {what}"));
    let mut length = None;
    loop {
        let mut line = String::new();
        let read = input.by_ref().take(LONGEST_LINE).read_line(&mut line)?;
        if read == 0 {
            return match length {
                None => Ok(None),
                Some(_) => Err(bad("a message ends in its header")),
            };
        }
        let line = line.trim_end_matches(['\r', '\n']);
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').ok_or_else(|| bad("a header without a colon"))?;
        if name.eq_ignore_ascii_case("Content-Length") {
            length = value.trim().parse::<u64>().ok();
        }
    }
    let length =
        length.ok_or_else(|| bad("a message without a length; `dreamc lsp` is started by editors"))?;
    if length > MOST {
        return Err(bad("a message is larger than 16 MiB"));
    }
    let mut body = vec![];
    input.by_ref().take(length).read_to_end(&mut body)?;
    match body.len() as u64 == length {
        true => Ok(Some(body)),
        false => Err(bad("a message is shorter than it says")),
    }
}

/// A message with its header.
pub fn frame(message: &Value) -> Vec<u8> {
    let body = message.to_string();
    format!("Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// The answer to a request.
pub fn answer(id: Value, result: Result<Value, Fault>) -> Value {
    match result {
        Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
        Err(fault) => {
            json!({"jsonrpc": "2.0", "id": id, "error": {"code": fault.code, "message": fault.message}})
        }
    }
}

/// A notification.
pub fn notification(method: &str, parameters: Value) -> Value {
    json!({"jsonrpc": "2.0", "method": method, "params": parameters})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_back_and_damage_is_an_error() {
        let message = notification("a", json!({"text": "ü"}));
        let bytes = [frame(&message), frame(&message)].concat();
        let mut input = bytes.as_slice();
        for _ in 0..2 {
            let body = read(&mut input).unwrap().unwrap();
            assert_eq!(serde_json::from_slice::<Value>(&body).unwrap(), message);
        }
        assert!(read(&mut input).unwrap().is_none());
        for bad in ["hello\r\n\r\n", "X: 1\r\n\r\n{}", "Content-Length: 9\r\n\r\n{}", "Content-Length: 2\r\n"]
        {
            assert!(read(&mut bad.as_bytes()).is_err(), "{bad:?}");
        }
        assert!(read(&mut b"Content-Length: 99999999999\r\n\r\n".as_slice()).is_err());
    }
}
