//! One argument of a call: words, descriptors with paths, strings, structures, arrays.

use winnow::{
    combinator::{alt, cut_err, fail, opt, peek, preceded, separated},
    error::{ContextError, ErrMode},
    prelude::*,
    token::{any, take_till, take_until, take_while},
};

/// How deep structures may be nested; strace itself goes to five or so.
const MAX_DEPTH: u32 = 24;

/// An argument as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Numbers, constants and what joins them: `NULL`, `0x7fff`, `PROT_READ|PROT_WRITE`, `8192*1024`, `makedev(1, 3)`.
    Word(String),
    /// A descriptor with its path: `3</etc/passwd>`, `AT_FDCWD</tmp>`.
    Fd {
        /// `3` or `AT_FDCWD`.
        word: String,
        /// The path, escapes resolved.
        path: String,
        /// `(deleted)` follows.
        deleted: bool,
    },
    /// A string; `cut` where strace wrote `...` behind it.
    Str {
        /// Its characters, escapes resolved.
        text: String,
        /// There was more.
        cut: bool,
    },
    /// `{a=1, b=2}`, also `a => b` inside.
    Struct(Vec<Value>),
    /// `[1, 2]`.
    Array(Vec<Value>),
    /// `name=value`.
    Named(String, Box<Value>),
    /// `before => after`: what the call read and what it wrote.
    Arrow(Box<Value>, Box<Value>),
    /// `...`.
    More,
}

impl Value {
    /// The field `name` of a structure; looks through `before => after` at `before`.
    pub fn field(&self, name: &str) -> Option<&Value> {
        match self {
            Self::Struct(fields) => fields.iter().find_map(|f| match f {
                Self::Named(n, v) if n == name => Some(v.as_ref()),
                _ => None,
            }),
            Self::Arrow(before, _) => before.field(name),
            _ => None,
        }
    }
}

type Parsed<T> = Result<T, ErrMode<ContextError>>;

/// Parses a list of arguments, which may be cut off behind a comma (a call that never came back).
///
/// # Errors
/// The text isn't a list of values.
pub fn parse_list(text: &str) -> Result<Vec<Value>, String> {
    let mut rest = text.trim().trim_end_matches(',');
    if rest.is_empty() {
        return Ok(Vec::new());
    }
    let list = list(0, &mut rest).map_err(|_| wrong(text, rest))?;
    if rest.trim().is_empty() {
        Ok(list)
    } else {
        Err(wrong(text, rest))
    }
}

fn wrong(text: &str, rest: &str) -> String {
    let at = text.len().saturating_sub(rest.len());
    format!(
        "arguments that can't be read from column {at} on: {:?}",
        super::line::shorten(rest)
    )
}

fn list(depth: u32, input: &mut &str) -> Parsed<Vec<Value>> {
    separated(0.., move |i: &mut &str| value(depth, i), comma).parse_next(input)
}

fn comma<'a>(input: &mut &'a str) -> Parsed<&'a str> {
    (spaces, ",", spaces).take().parse_next(input)
}

fn spaces<'a>(input: &mut &'a str) -> Parsed<&'a str> {
    take_while(0.., ' ').parse_next(input)
}

fn value(depth: u32, input: &mut &str) -> Parsed<Value> {
    if depth > MAX_DEPTH {
        return fail.parse_next(input);
    }
    let first = alt((
        |i: &mut &str| named(depth, i),
        |i: &mut &str| plain(depth, i),
    ))
    .parse_next(input)?;
    comments(input)?;
    if opt((spaces, "=>", spaces)).parse_next(input)?.is_some() {
        let after = value(depth + 1, input)?;
        return Ok(Value::Arrow(Box::new(first), Box::new(after)));
    }
    Ok(first)
}

/// `name=value`, not `a=>b` and not `a==b`.
fn named(depth: u32, input: &mut &str) -> Parsed<Value> {
    let name =
        take_while(1.., |c: char| c.is_ascii_alphanumeric() || c == '_').parse_next(input)?;
    "=".parse_next(input)?;
    peek(any.verify(|c| *c != '>' && *c != '=')).parse_next(input)?;
    let inner = value(depth + 1, input)?;
    Ok(Value::Named(name.to_owned(), Box::new(inner)))
}

fn plain(depth: u32, input: &mut &str) -> Parsed<Value> {
    comments(input)?;
    alt((
        string,
        |i: &mut &str| bracketed(depth, "{", "}", i).map(Value::Struct),
        |i: &mut &str| bracketed(depth, "[", "]", i).map(Value::Array),
        |i: &mut &str| {
            preceded("~", |i: &mut &str| bracketed(depth, "[", "]", i))
                .map(Value::Array)
                .parse_next(i)
        },
        "...".value(Value::More),
        word,
    ))
    .parse_next(input)
}

fn bracketed(
    depth: u32,
    open: &'static str,
    close: &'static str,
    input: &mut &str,
) -> Parsed<Vec<Value>> {
    (open, spaces).parse_next(input)?;
    // Signal sets are separated by blanks: [INT TERM].
    let items = separated(
        0..,
        move |i: &mut &str| value(depth + 1, i),
        alt((comma, take_while(1.., ' '))),
    )
    .parse_next(input)?;
    (spaces, cut_err(close)).parse_next(input)?;
    Ok(items)
}

fn string(input: &mut &str) -> Parsed<Value> {
    "\"".parse_next(input)?;
    let mut raw = String::new();
    loop {
        raw.push_str(take_till(0.., ('"', '\\')).parse_next(input)?);
        if any.parse_next(input)? == '"' {
            break;
        }
        raw.push('\\');
        raw.push(any.parse_next(input)?);
    }
    let cut = opt("...").parse_next(input)?.is_some();
    Ok(Value::Str {
        text: unescape(&raw),
        cut,
    })
}

/// A word with what may follow it: operators, a call-like suffix, a path.
fn word(input: &mut &str) -> Parsed<Value> {
    let text = expression.take().parse_next(input)?.to_owned();
    if opt("<").parse_next(input)?.is_none() {
        return Ok(Value::Word(text));
    }
    let path = path_text(input)?;
    let deleted = opt(alt((" (deleted)", "(deleted)")))
        .parse_next(input)?
        .is_some();
    Ok(Value::Fd {
        word: text,
        path: unescape(path),
        deleted,
    })
}

/// Everything up to the `>` that isn't part of `->`.
fn path_text<'a>(input: &mut &'a str) -> Parsed<&'a str> {
    let bytes = input.as_bytes();
    let end = (0..bytes.len()).find(|&i| bytes[i] == b'>' && (i == 0 || bytes[i - 1] != b'-'));
    let Some(end) = end else {
        return fail.parse_next(input);
    };
    let path = &input[..end];
    *input = &input[end + 1..];
    Ok(path)
}

fn expression(input: &mut &str) -> Parsed<()> {
    term(input)?;
    while opt(operator).parse_next(input)?.is_some() {
        term(input)?;
    }
    Ok(())
}

fn operator<'a>(input: &mut &'a str) -> Parsed<&'a str> {
    (spaces, alt(("||", "|", "*", "<<", "+")), spaces)
        .take()
        .parse_next(input)
}

fn term(input: &mut &str) -> Parsed<()> {
    opt(alt(("-", "~"))).parse_next(input)?;
    take_while(1.., |c: char| {
        c.is_ascii_alphanumeric() || "_?.@:/".contains(c)
    })
    .parse_next(input)?;
    if input.starts_with('(') && !input.starts_with("(deleted)") {
        ("(", take_till(0.., ('(', ')')), ")")
            .take()
            .parse_next(input)?;
    }
    comments(input)
}

fn comments(input: &mut &str) -> Parsed<()> {
    while opt((spaces, "/*", take_until(0.., "*/"), "*/", spaces))
        .parse_next(input)?
        .is_some()
    {}
    Ok(())
}

/// Resolves C escapes; bytes beyond ASCII become the replacement character, since a path isn't always text.
fn unescape(raw: &str) -> String {
    if !raw.contains('\\') {
        return raw.to_owned();
    }
    let mut out = Vec::with_capacity(raw.len());
    let mut bytes = raw.bytes().peekable();
    while let Some(b) = bytes.next() {
        if b != b'\\' {
            out.push(b);
            continue;
        }
        match bytes.next() {
            Some(b'n') => out.push(b'\n'),
            Some(b't') => out.push(b'\t'),
            Some(b'r') => out.push(b'\r'),
            Some(b'v') => out.push(0x0b),
            Some(b'f') => out.push(0x0c),
            Some(b'x') => out.push(digits(&mut bytes, 16, 2, 0)),
            Some(d @ b'0'..=b'7') => out.push(digits(&mut bytes, 8, 2, d - b'0')),
            Some(other) => out.push(other),
            None => {}
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn digits(
    bytes: &mut std::iter::Peekable<std::str::Bytes<'_>>,
    radix: u32,
    most: u32,
    first: u8,
) -> u8 {
    let mut value = u32::from(first);
    for _ in 0..most {
        let Some(d) = bytes.peek().and_then(|&b| char::from(b).to_digit(radix)) else {
            break;
        };
        value = value * radix + d;
        bytes.next();
    }
    u8::try_from(value).unwrap_or(b'?')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(text: &str) -> Value {
        Value::Word(text.into())
    }

    fn one(text: &str) -> Value {
        let mut list = parse_list(text).unwrap();
        assert_eq!(list.len(), 1, "{text}");
        list.remove(0)
    }

    #[test]
    fn words_descriptors_and_strings() {
        assert_eq!(
            parse_list("0x7000, -1, PROT_READ|PROT_EXEC, 8192*1024, 0x66 /* MADV_??? */, 0600")
                .unwrap(),
            [
                "0x7000",
                "-1",
                "PROT_READ|PROT_EXEC",
                "8192*1024",
                "0x66 /* MADV_??? */",
                "0600"
            ]
            .map(word)
        );
        assert_eq!(
            one("3</memfd:ring>(deleted)"),
            Value::Fd {
                word: "3".into(),
                path: "/memfd:ring".into(),
                deleted: true
            }
        );
        assert_eq!(
            one("AT_FDCWD</tmp/a\\76b>"),
            Value::Fd {
                word: "AT_FDCWD".into(),
                path: "/tmp/a>b".into(),
                deleted: false
            }
        );
        assert_eq!(
            one(r#""a\"b\n\1012"..."#),
            Value::Str {
                text: "a\"b\nA2".into(),
                cut: true
            }
        );
        assert_eq!(
            one("4<UNIX:[1->2]>"),
            Value::Fd {
                word: "4".into(),
                path: "UNIX:[1->2]".into(),
                deleted: false
            }
        );
    }

    #[test]
    fn structures_and_what_a_call_wrote() {
        let list =
            parse_list("{flags=CLONE_VM|CLONE_VFORK, exit_signal=SIGCHLD, stack=0x7000} => {parent_tid=[12]}, 88").unwrap();
        assert_eq!(list.len(), 2);
        assert_eq!(list[0].field("flags"), Some(&word("CLONE_VM|CLONE_VFORK")));
        assert_eq!(list[0].field("none"), None);
        let io = one("{flags=0, sq_off={head=0, tail=4}, features=IORING_FEAT_NODROP|0x3e000}");
        assert_eq!(
            io.field("sq_off").and_then(|s| s.field("tail")),
            Some(&word("4"))
        );
        assert_eq!(
            one("[INT TERM]"),
            Value::Array(vec![word("INT"), word("TERM")])
        );
        assert_eq!(one("[0x7fff]"), Value::Array(vec![word("0x7fff")]));
        assert_eq!(
            parse_list("child_stack=NULL, flags=SIGCHLD").unwrap().len(),
            2
        );
    }

    #[test]
    fn a_list_may_end_behind_a_comma() {
        assert_eq!(parse_list("0, RLIMIT_STACK, NULL, ").unwrap().len(), 3);
        assert_eq!(parse_list("").unwrap(), []);
    }

    #[test]
    fn nonsense_and_endless_nesting_are_errors() {
        for text in ["{", "[1", "\"abc", "{a=}", "1 2", ")", "3<abc", "/* "] {
            assert!(parse_list(text).is_err(), "{text}");
        }
        assert!(parse_list(&"[".repeat(100_000)).is_err());
        assert!(parse_list(&"a=".repeat(100_000)).is_err());
        assert!(parse_list(&format!("{}1{}", "[".repeat(1000), "]".repeat(1000))).is_err());
    }
}
