//! Tokens of a text, its directives obeyed and its macros put in their places.
//!
//! *In*: a text. *Out*: tokens with the line each came from. *Promise*: `#include`, `#pragma` and
//! comments leave nothing; a macro is not expanded inside itself, so this comes to an end.

use super::StatementError;
use std::collections::HashMap;

type Result<T> = std::result::Result<T, StatementError>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Word(String),
    Number(String),
    Mark(&'static str),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) line: usize,
}

impl Token {
    pub(super) fn text(&self) -> &str {
        match &self.kind {
            Kind::Word(text) | Kind::Number(text) => text,
            Kind::Mark(mark) => mark,
        }
    }

    fn is(&self, mark: &str) -> bool {
        matches!(self.kind, Kind::Mark(m) if m == mark)
    }
}

/// Longer ones first.
const MARKS: [&str; 44] = [
    "<<=", ">>=", "##", "->", "++", "--", "<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "+=", "-=", "*=",
    "/=", "%=", "&=", "|=", "^=", "+", "-", "*", "/", "%", "=", "<", ">", "!", "&", "|", "^", "~", "?", ":",
    ";", ",", ".", "(", ")", "{", "}",
];
const BRACKETS: [&str; 2] = ["[", "]"];

fn tokens(text: &str, line: usize) -> Result<Vec<Token>> {
    let mut rest = text;
    let mut list = vec![];
    while let Some(first) = rest.chars().next() {
        if first.is_whitespace() {
            rest = &rest[first.len_utf8()..];
            continue;
        }
        if rest.starts_with("//") {
            break;
        }
        let name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let (kind, length) = if first.is_ascii_digit() {
            let hexadecimal = rest.starts_with("0x");
            let mut before = ' ';
            let end = rest.find(|c: char| {
                let exponent = !hexadecimal && matches!(before, 'e' | 'E') && matches!(c, '+' | '-');
                before = c;
                !(name(c) || c == '.' || exponent)
            });
            let end = end.unwrap_or(rest.len());
            (Kind::Number(rest[..end].into()), end)
        } else if name(first) {
            let end = rest.find(|c| !name(c)).unwrap_or(rest.len());
            (Kind::Word(rest[..end].into()), end)
        } else {
            let mark = MARKS.iter().chain(&BRACKETS).find(|mark| rest.starts_with(**mark));
            let mark = mark.ok_or_else(|| StatementError::at(line, format!("`{first}` begins no token")))?;
            (Kind::Mark(mark), mark.len())
        };
        list.push(Token { kind, line });
        rest = &rest[length..];
    }
    Ok(list)
}

#[derive(Clone, Debug)]
struct Macro {
    /// `None` where it takes no parentheses.
    params: Option<Vec<String>>,
    body: Vec<Token>,
}

/// A condition under way: whether its lines count, whether one of its branches did, and whether the
/// lines around it do.
struct Branch {
    taken: bool,
    done: bool,
    around: bool,
}

#[derive(Default)]
struct Expander {
    macros: HashMap<String, Macro>,
    out: Vec<Token>,
    waiting: Vec<Token>,
}

/// The tokens of a text.
pub(super) fn expand(text: &str) -> Result<Vec<Token>> {
    let mut expander = Expander::default();
    let mut branches: Vec<Branch> = vec![];
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let number = number + 1;
        let mut line = line.trim_end().to_string();
        while line.ends_with('\\') {
            line.pop();
            let Some((_, next)) = lines.next() else { break };
            line.push_str(next.trim_end());
        }
        let taken = branches.last().is_none_or(|b| b.taken);
        let Some(directive) = line.trim_start().strip_prefix('#') else {
            if taken {
                expander.waiting.extend(tokens(&line, number)?);
            }
            continue;
        };
        let directive = directive.trim();
        let (word, rest) = directive.split_once(char::is_whitespace).unwrap_or((directive, ""));
        let stray = || StatementError::at(number, format!("#{word} without an #if"));
        match word {
            "if" => {
                let holds = taken && expander.condition(rest, number)?;
                branches.push(Branch { taken: holds, done: holds, around: taken });
            }
            "elif" | "else" => {
                let branch = branches.last().ok_or_else(stray)?;
                let open = branch.around && !branch.done;
                let holds = open && (word == "else" || expander.condition(rest, number)?);
                if let Some(branch) = branches.last_mut() {
                    branch.taken = holds;
                    branch.done |= holds;
                }
            }
            "endif" => {
                branches.pop().ok_or_else(stray)?;
            }
            "define" if taken => expander.define(rest, number)?,
            "define" | "include" | "pragma" => {}
            _ => return Err(StatementError::at(number, format!("#{word} is not known"))),
        }
    }
    if !branches.is_empty() {
        return Err(StatementError::at(text.lines().count(), "an #if without its #endif".into()));
    }
    expander.flush()?;
    Ok(expander.out)
}

impl Expander {
    /// Tokens so far are expanded by the macros of here.
    fn flush(&mut self) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        let expanded = self.macros(&waiting, &[])?;
        self.out.extend(expanded);
        Ok(())
    }

    fn define(&mut self, rest: &str, line: usize) -> Result<()> {
        self.flush()?;
        let rest = rest.trim_start();
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let (params, body) = match rest.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
            Some((params, body)) => {
                let params = params.split(',').map(|p| p.trim().to_string()).filter(|p| !p.is_empty());
                (Some(params.collect()), body)
            }
            None => (None, rest),
        };
        self.macros.insert(name.into(), Macro { params, body: tokens(body, line)? });
        Ok(())
    }

    fn condition(&mut self, text: &str, line: usize) -> Result<bool> {
        self.flush()?;
        let list = self.macros(&tokens(text, line)?, &[])?;
        let mut at = 0;
        let holds = value(&list, &mut at, 0, line)?;
        match at == list.len() {
            true => Ok(holds != 0),
            false => Err(StatementError::at(line, format!("a condition that is not understood: {text}"))),
        }
    }

    /// `active` are the macros whose bodies these tokens are of.
    fn macros(&self, list: &[Token], active: &[&str]) -> Result<Vec<Token>> {
        let mut out = vec![];
        let mut at = 0;
        while let Some(token) = list.get(at) {
            at += 1;
            let found = match &token.kind {
                Kind::Word(name) if !active.contains(&name.as_str()) => self.macros.get_key_value(name),
                _ => None,
            };
            let Some((name, of)) = found else {
                out.push(token.clone());
                continue;
            };
            let mut inside = active.to_vec();
            inside.push(name);
            let body = match &of.params {
                None => of.body.clone(),
                Some(_) if !list.get(at).is_some_and(|t| t.is("(")) => {
                    out.push(token.clone());
                    continue;
                }
                Some(params) => {
                    let (given, after) = arguments(list, at, token.line)?;
                    at = after;
                    if given.len() != params.len() {
                        let (wants, has) = (params.len(), given.len());
                        let message = format!("`{name}` takes {wants} arguments and has {has}");
                        return Err(StatementError::at(token.line, message));
                    }
                    self.filled(of, params, &given, active)?
                }
            };
            let body: Vec<Token> = body.into_iter().map(|t| Token { line: token.line, ..t }).collect();
            out.extend(self.macros(&body, &inside)?);
        }
        Ok(out)
    }

    /// The body of a macro with its arguments: as they are at `##`, else expanded.
    fn filled(
        &self,
        of: &Macro,
        params: &[String],
        given: &[Vec<Token>],
        active: &[&str],
    ) -> Result<Vec<Token>> {
        let mut out: Vec<Token> = vec![];
        let mut at = 0;
        while let Some(token) = of.body.get(at) {
            let pasted = at > 0 && of.body[at - 1].is("##");
            let pastes = of.body.get(at + 1).is_some_and(|t| t.is("##"));
            at += 1;
            if token.is("##") {
                continue;
            }
            let param = params.iter().position(|p| matches!(&token.kind, Kind::Word(w) if w == p));
            let mut part = match param {
                Some(n) if pasted || pastes => given[n].clone(),
                Some(n) => self.macros(&given[n], active)?,
                None => vec![token.clone()],
            };
            if pasted && !part.is_empty() {
                let first = part.remove(0);
                if let Some(Token { kind: Kind::Word(word) | Kind::Number(word), .. }) = out.last_mut() {
                    word.push_str(first.text());
                } else {
                    out.push(first);
                }
            }
            out.extend(part);
        }
        Ok(out)
    }
}

/// The arguments from a parenthesis on, and the place after them.
fn arguments(list: &[Token], open: usize, line: usize) -> Result<(Vec<Vec<Token>>, usize)> {
    let mut given = vec![vec![]];
    let mut depth = 0;
    for (at, token) in list.iter().enumerate().skip(open) {
        match token.text() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Ok((given, at + 1));
        }
        if at == open {
            continue;
        }
        match (depth, token.is(",")) {
            (1, true) => given.push(vec![]),
            _ => given.last_mut().into_iter().for_each(|part| part.push(token.clone())),
        }
    }
    Err(StatementError::at(line, "a parenthesis that is not closed".into()))
}

/// Operators of conditions, from the loosest.
const LEVELS: [&[&str]; 4] = [&["||"], &["&&"], &["==", "!="], &["<", ">", "<=", ">="]];

/// The value of a condition's tokens from `at` on; a name that nothing defines is 0.
fn value(list: &[Token], at: &mut usize, level: usize, line: usize) -> Result<i64> {
    let Some(operators) = LEVELS.get(level) else { return atom(list, at, line) };
    let mut left = value(list, at, level + 1, line)?;
    while let Some(operator) = list.get(*at).map(Token::text).filter(|text| operators.contains(text)) {
        *at += 1;
        let right = value(list, at, level + 1, line)?;
        left = i64::from(match operator {
            "||" => left != 0 || right != 0,
            "&&" => left != 0 && right != 0,
            "==" => left == right,
            "!=" => left != right,
            "<" => left < right,
            ">" => left > right,
            "<=" => left <= right,
            _ => left >= right,
        });
    }
    Ok(left)
}

fn atom(list: &[Token], at: &mut usize, line: usize) -> Result<i64> {
    let wrong = || StatementError::at(line, "a condition that is not understood".into());
    let token = list.get(*at).ok_or_else(wrong)?;
    *at += 1;
    match &token.kind {
        Kind::Mark("!") => Ok(i64::from(atom(list, at, line)? == 0)),
        Kind::Mark("-") => Ok(atom(list, at, line)?.wrapping_neg()),
        Kind::Mark("(") => {
            let inside = value(list, at, 0, line)?;
            *at += 1;
            list.get(*at - 1).filter(|t| t.is(")")).map(|_| inside).ok_or_else(wrong)
        }
        Kind::Number(text) => text.trim_end_matches(['l', 'u']).parse().map_err(|_| wrong()),
        Kind::Word(_) => Ok(0),
        Kind::Mark(_) => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(text: &str) -> String {
        expand(text).unwrap().iter().map(Token::text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn macros_are_put_in_their_places() {
        assert_eq!(expanded("#define N 4ll\nx + N // a comment"), "x + 4ll");
        assert_eq!(
            expanded("#define AT(x, i) ((x) + (i) * x##_stride)\nAT(q, f(a, b))"),
            "( ( q ) + ( f ( a , b ) ) * q_stride )"
        );
        assert_eq!(
            expanded("#define READ(n, c) n[FIRST_##n(c)]\n#define FIRST_q(c) (c)\nREAD(q, 1)"),
            "q [ ( 1 ) ]"
        );
        assert_eq!(expanded("#define READS , x0\nf(1 READS)"), "f ( 1 , x0 )");
        assert_eq!(expanded("#define x x + 1\nx"), "x + 1");
        assert_eq!(expanded("#define LONG(a) \\\n  a; \\\n  a\nLONG(b)\nLONG"), "b ; b LONG");
    }

    #[test]
    fn conditions_choose_lines() {
        let text =
            "#if N == 1\none\n#elif N > 1 && !ZERO\nmore\n#if ZERO\ninside\n#endif\n#else\nnone\n#endif\nend";
        for (n, kept) in [("1", "one end"), ("2ll", "more end"), ("0", "none end")] {
            assert_eq!(expanded(&format!("#define N {n}\n#define ZERO 0\n{text}")), kept);
        }
        for broken in [
            "#if 1",
            "#else",
            "#endif",
            "#if (1\n#endif",
            "#define F(x) x\nF(1, 2)",
            "#define F(x) x\nF(1",
            "@",
            "#other",
        ] {
            expand(broken).unwrap_err();
        }
    }
}
