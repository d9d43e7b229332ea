//! One line of a log: who, and what kind of line.
//!
//! All prefixes that strace's options make are understood: the pid as `-o` writes it (`123 `) and as the terminal
//! shows it (`[pid 123] `), and the times of `-t`, `-tt`, `-ttt` and `-r`.

use winnow::{
    ascii::{digit1, space0, space1},
    combinator::{alt, delimited, opt, preceded, terminated},
    prelude::*,
    token::take_while,
};

/// A line, its parts borrowed from the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line<'a> {
    /// The task; `None` where strace followed a single one and wrote no pid.
    pub pid: Option<u32>,
    /// What the line says.
    pub body: Body<'a>,
}

/// What a line says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body<'a> {
    /// A whole call: `name(args) = ret`.
    Whole {
        /// The system call.
        name: &'a str,
        /// What stands between the parentheses.
        args: &'a str,
        /// What follows the equals sign.
        ret: &'a str,
    },
    /// `name(args <unfinished ...>`.
    Begin {
        /// The system call.
        name: &'a str,
        /// The arguments so far.
        args: &'a str,
    },
    /// `<... name resumed>rest) = ret`.
    Resumed {
        /// The system call.
        name: &'a str,
        /// The rest of the line, to be appended to the arguments so far.
        rest: &'a str,
    },
    /// `--- SIGCHLD {...} ---` or `--- stopped by SIGSTOP ---`.
    Signal,
    /// `+++ exited with 0 +++`, `+++ killed by SIGTERM +++`.
    Exit,
    /// `+++ superseded by execve in pid 123 +++`: thread `by` took this pid over.
    Superseded {
        /// The thread that did the execve.
        by: u32,
    },
    /// What strace says about itself: `strace: Process 123 attached`.
    Note,
}

/// Parses one line.
///
/// # Errors
/// Why the line isn't one of strace's.
pub fn parse(text: &str) -> Result<Line<'_>, String> {
    let mut rest = text;
    let Ok(pid) = prefix.parse_next(&mut rest) else {
        return Err(format!("no line of strace: {:?}", shorten(text)));
    };
    Ok(Line {
        pid,
        body: body(rest)?,
    })
}

/// Cuts a text for a message.
pub fn shorten(text: &str) -> &str {
    text.char_indices()
        .nth(60)
        .map_or(text, |(at, _)| &text[..at])
}

/// `[pid 123] ` or `123 `, then times; both optional.
fn prefix(input: &mut &str) -> winnow::Result<Option<u32>> {
    let number = || digit1.parse_to::<u32>();
    let pid = opt(alt((
        delimited("[pid ", preceded(space0, number()), ("]", space1)),
        // A number that a '.' or a ':' follows is a time.
        terminated(number(), space1),
    )))
    .parse_next(input)?;
    space0.parse_next(input)?;
    // `-r` together with `-t` writes "12:00:01 (+     0.000123) ".
    opt((clock, space1)).parse_next(input)?;
    opt(("(+", space0, clock, ")", space1)).parse_next(input)?;
    Ok(pid)
}

/// `12:00:01`, `12:00:01.000123`, `1764494000.123456`, `0.000123`.
fn clock<'a>(input: &mut &'a str) -> winnow::Result<&'a str> {
    (digit1, take_while(1.., ('0'..='9', '.', ':')))
        .take()
        .parse_next(input)
}

fn body(rest: &str) -> Result<Body<'_>, String> {
    if let Some(rest) = rest.strip_prefix("+++ ") {
        return exit(rest);
    }
    if rest.starts_with("--- ") {
        return if rest.ends_with(" ---") {
            Ok(Body::Signal)
        } else {
            Err("a signal line that is cut off".into())
        };
    }
    if rest.starts_with("strace: ") {
        return Ok(Body::Note);
    }
    if let Some(rest) = rest.strip_prefix("<... ") {
        let Some((name, rest)) = rest.split_once(" resumed>") else {
            return Err("'<...' without 'resumed>': the line is cut off".into());
        };
        return if is_name(name) {
            Ok(Body::Resumed { name, rest })
        } else {
            Err(format!("no system call: {name:?}"))
        };
    }
    let Some((name, rest)) = rest.split_once('(').filter(|(name, _)| is_name(name)) else {
        return Err(format!("no line of strace: {:?}", shorten(rest)));
    };
    if let Some(args) = unfinished(rest) {
        return Ok(Body::Begin { name, args });
    }
    let (args, result) = split_result(rest)?;
    Ok(Body::Whole {
        name,
        args,
        ret: result,
    })
}

/// The arguments of a call whose line ends before the call did, or whose task strace let go of.
fn unfinished(rest: &str) -> Option<&str> {
    [" <unfinished ...>", " <detached ...>", "<unfinished ...>"]
        .iter()
        .find_map(|tail| rest.strip_suffix(tail))
}

fn exit(rest: &str) -> Result<Body<'_>, String> {
    let Some(what) = rest.strip_suffix(" +++") else {
        return Err("an exit line that is cut off".into());
    };
    if let Some(by) = what.strip_prefix("superseded by execve in pid ") {
        return by
            .trim()
            .parse()
            .map(|by| Body::Superseded { by })
            .map_err(|_| format!("no pid: {by:?}"));
    }
    if what.starts_with("exited with ") || what.starts_with("killed by ") {
        return Ok(Body::Exit);
    }
    Err(format!(
        "an exit line that strace doesn't write: {:?}",
        shorten(what)
    ))
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'?')
}

/// Splits what follows `name(` at the parenthesis that closes the arguments: `(arguments, result)`.
///
/// # Errors
/// There is no such parenthesis or no ` = result` behind it.
pub fn split_result(text: &str) -> Result<(&str, &str), String> {
    let close = closing(text)?;
    let after = text[close + 1..].trim_start();
    let Some(result) = after.strip_prefix("= ").filter(|result| !result.is_empty()) else {
        return Err("no result: the line is cut off".into());
    };
    Ok((&text[..close], result))
}

/// Where the parenthesis is that closes the arguments. Quoted strings, `<paths>` and comments may contain anything.
fn closing(text: &str) -> Result<usize, String> {
    let bytes = text.as_bytes();
    let (mut i, mut depth) = (0, 0_u32);
    while let Some(&b) = bytes.get(i) {
        match b {
            b'"' => {
                i = skip_string(bytes, i).ok_or("a string without its end: the line is cut off")?;
            }
            b'<' if opens_path(bytes, i) => {
                i = skip_path(bytes, i).ok_or("a path without its end: the line is cut off")?;
            }
            b'/' if bytes.get(i + 1) == Some(&b'*') => {
                i = text[i..]
                    .find("*/")
                    .ok_or("a comment without its end: the line is cut off")?
                    + i
                    + 1;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' if depth == 0 => return Ok(i),
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        i += 1;
    }
    Err("no closing parenthesis: the line is cut off".into())
}

/// `3</path>` and `AT_FDCWD</path>` open a path, `1<<12` doesn't.
fn opens_path(bytes: &[u8], at: usize) -> bool {
    let word_before = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    word_before && bytes.get(at + 1).is_some_and(|&b| b != b'<' && b != b' ')
}

/// The index of the closing quote of the string that begins at `at`.
fn skip_string(bytes: &[u8], at: usize) -> Option<usize> {
    let mut i = at + 1;
    loop {
        match bytes.get(i)? {
            b'\\' => i += 2,
            b'"' => return Some(i),
            _ => i += 1,
        }
    }
}

/// The index of the `>` of the path that begins at `at`; `->` between two addresses (`-yy`) doesn't end it.
fn skip_path(bytes: &[u8], at: usize) -> Option<usize> {
    (at + 1..bytes.len()).find(|&i| bytes[i] == b'>' && bytes[i - 1] != b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole<'a>(pid: Option<u32>, name: &'a str, args: &'a str, ret: &'a str) -> Line<'a> {
        Line {
            pid,
            body: Body::Whole { name, args, ret },
        }
    }

    #[test]
    fn every_prefix_is_understood() {
        for (text, pid) in [
            ("123   brk(NULL) = 0x1000", Some(123)),
            ("[pid 123] brk(NULL) = 0x1000", Some(123)),
            ("[pid   123] 12:00:01.000123 brk(NULL) = 0x1000", Some(123)),
            ("123 1764494000.123456 brk(NULL) = 0x1000", Some(123)),
            ("123 12:00:01 brk(NULL) = 0x1000", Some(123)),
            (
                "123 12:00:01.123456 (+     0.000123) brk(NULL) = 0x1000",
                Some(123),
            ),
            ("123      0.000123 brk(NULL) = 0x1000", Some(123)),
            ("1764494000.123456 brk(NULL) = 0x1000", None),
            ("     0.000123 brk(NULL) = 0x1000", None),
            ("brk(NULL) = 0x1000", None),
        ] {
            assert_eq!(
                parse(text),
                Ok(whole(pid, "brk", "NULL", "0x1000")),
                "{text}"
            );
        }
    }

    #[test]
    fn kinds_of_lines_are_told_apart() {
        let body = |text| parse(text).unwrap().body;
        assert_eq!(
            body("1 munmap(0x7000, 36211 <unfinished ...>"),
            Body::Begin {
                name: "munmap",
                args: "0x7000, 36211"
            }
        );
        assert_eq!(
            body("1 vfork( <unfinished ...>"),
            Body::Begin {
                name: "vfork",
                args: ""
            }
        );
        assert_eq!(
            body("1 <... munmap resumed>)  = 0"),
            Body::Resumed {
                name: "munmap",
                rest: ")  = 0"
            }
        );
        assert_eq!(body("1 --- SIGCHLD {si_signo=SIGCHLD} ---"), Body::Signal);
        assert_eq!(body("1 +++ exited with 0 +++"), Body::Exit);
        assert_eq!(
            body("1 +++ killed by SIGSEGV (core dumped) +++"),
            Body::Exit
        );
        assert_eq!(
            body("1 +++ superseded by execve in pid 77 +++"),
            Body::Superseded { by: 77 }
        );
        assert_eq!(body("strace: Process 5 attached"), Body::Note);
    }

    #[test]
    fn arguments_end_at_their_own_parenthesis() {
        for (text, args, ret) in [
            (
                r#"open("a) = 1\")", O_RDONLY) = 3</x)y>"#,
                r#""a) = 1\")", O_RDONLY"#,
                "3</x)y>",
            ),
            ("f(3</a (b)>(deleted), 0) = 0", "3</a (b)>(deleted), 0", "0"),
            (
                "f(0x66 /* MADV_??? :) */, 1<<12) = 0",
                "0x66 /* MADV_??? :) */, 1<<12",
                "0",
            ),
            (
                "f({a=[1, 2], b=makedev(0x1, 0x3)}, 88) = 125",
                "{a=[1, 2], b=makedev(0x1, 0x3)}, 88",
                "125",
            ),
            ("f(4<UNIX:[1->2]>) = 0", "4<UNIX:[1->2]>", "0"),
            (
                "f() = ? ERESTARTSYS (To be restarted)",
                "",
                "? ERESTARTSYS (To be restarted)",
            ),
        ] {
            let name = text.split('(').next().unwrap();
            assert_eq!(parse(text), Ok(whole(None, name, args, ret)), "{text}");
        }
    }

    #[test]
    fn no_cut_of_a_line_is_taken_for_a_line() {
        for text in [
            r#"15571 openat(AT_FDCWD</tmp/t>, "/etc/ld.so.cache", O_RDONLY|O_CLOEXEC) = 3</etc/ld.so.cache>"#,
            "15571 madvise(0x7ffff76ee000, 20480, 0x66 /* MADV_??? */) = 0",
            "15571 +++ exited with 0 +++",
            "15571 --- SIGCHLD {si_signo=SIGCHLD} ---",
        ] {
            let result = text.find(") = ").map_or(text.len(), |at| at + 5);
            for cut in (0..text.len()).take_while(|&cut| cut < result) {
                assert!(parse(&text[..cut]).is_err(), "{}", &text[..cut]);
            }
        }
    }

    #[test]
    fn garbage_is_an_error() {
        for text in [
            "",
            "hello",
            "15571",
            "15571 ",
            "()",
            "123 (x) = 1",
            "1 <... munmap",
            "1 +++ what +++",
            "\u{0}\u{1}",
        ] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
